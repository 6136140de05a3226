"""What is trained: a model, its loss and its data."""
