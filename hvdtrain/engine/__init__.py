"""Engines: an optimizer and the exchange of its gradients, as the trainer uses them."""
