"""What a job does, as one value that follows from its options and ranks. Needs no torch."""
