"""What travels instead of a gradient: one file a compressor."""
