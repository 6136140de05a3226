"""How gradients become sums over ranks while backward runs."""
