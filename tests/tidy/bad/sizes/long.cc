@{401 times}// One line too many.
