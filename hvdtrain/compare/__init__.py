"""Compare runs: their losses at equal samples and at equal times, their options, and their cost."""
