"""Checks of the installation, the machine and the launcher."""
