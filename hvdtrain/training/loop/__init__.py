"""The training loop: steps, evaluation, checkpoints and signals."""
