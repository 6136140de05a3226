"""The options of a run and their parsing."""
