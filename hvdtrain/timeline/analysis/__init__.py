"""Analysis of traces: budget, communication, stragglers, causes, findings, lanes. Pure."""
