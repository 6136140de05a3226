"""How fast the links between and within hosts are, and what a job may expect of them."""
