"""Tasks: a model, its loss and its data."""
