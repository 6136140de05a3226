"""Finding what went wrong in training: non-finite numbers, loss spikes, drift between ranks, memory."""
