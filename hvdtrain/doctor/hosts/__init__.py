"""Several hosts: whether ssh gets there, whether they are alike, and whether they reach each other."""
