"""Compressors of gradients, one file each."""
