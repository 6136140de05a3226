"""What is written and shown of a run."""
