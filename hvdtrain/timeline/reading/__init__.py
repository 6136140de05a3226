"""How a Timeline of Horovod is read; `hvdtrain.timeline.read` is the way in."""
