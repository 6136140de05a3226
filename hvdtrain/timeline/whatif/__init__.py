"""A step predicted: replayed as it was measured, with one thing or another changed."""
