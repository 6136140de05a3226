"""How the trainer sees an optimizer whose gradients are summed over ranks."""
