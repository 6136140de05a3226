"""Explain why a run failed: statements of the ranks, the cause, one failure card."""
