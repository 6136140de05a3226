"""Analysis of traces: budget, communication, stragglers, causes, findings. Pure."""
