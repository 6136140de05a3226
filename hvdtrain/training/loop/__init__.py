"""The training loop: steps, evaluation, saving and signals."""
