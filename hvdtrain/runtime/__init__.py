"""Facts about this process and its job, known before communication starts."""
