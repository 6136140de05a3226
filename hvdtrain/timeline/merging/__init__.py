"""The sources of a merged trace. `hvdtrain.timeline.merge` is the entry point."""
