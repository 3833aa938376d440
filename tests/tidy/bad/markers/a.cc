// Nothing wrong here.
// TO@{}DO(someone): finish.
