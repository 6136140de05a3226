"""State of a process that outlives a round of an elastic job, and roll backs to an earlier state."""
