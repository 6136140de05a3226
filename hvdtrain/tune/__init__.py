"""Search for better values of options, by optuna."""
