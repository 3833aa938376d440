# Runs nowhere.
