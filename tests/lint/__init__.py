"""Checks of `make lint` that ruff and mypy do not have."""
