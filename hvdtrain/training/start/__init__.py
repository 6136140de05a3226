"""The start of a run: its folder, checks before a resume, task, optimizer and restored state."""
