"""Callbacks of training: the contract, those of a run together, and those that options ask for."""
