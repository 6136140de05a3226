"""Checks of several hosts: differences between them, connections, clocks."""
