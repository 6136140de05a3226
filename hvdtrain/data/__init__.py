"""The order of samples, and loading them."""
