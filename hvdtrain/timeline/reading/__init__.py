"""The parts of Horovod's Timeline reader. `hvdtrain.timeline.read` is the entry point."""
