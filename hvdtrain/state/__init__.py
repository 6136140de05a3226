"""The state of a run, its copies in memory and its checkpoints on disk."""
