"""What a process knows of its job before communication starts."""
