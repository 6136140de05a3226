"""Starting and keeping jobs whose ranks come and go: the driver of ``hvdtrain launch`` and its agents."""
