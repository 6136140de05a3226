"""Checks of several hosts: differences between them, and connections."""
