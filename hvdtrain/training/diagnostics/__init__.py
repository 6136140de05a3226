"""Diagnostics of training: non-finite numbers, loss spikes, drift between ranks, memory, failures."""
