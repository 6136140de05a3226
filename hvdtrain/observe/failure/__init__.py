"""How a run that fails explains itself: statements of ranks, who is to blame, one card."""
