"""Used by quickstart.sh."""
