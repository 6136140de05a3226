"""State that outlives a round of an elastic job, and going back to it."""
