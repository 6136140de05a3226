"""What is made of columns: budget, communication, blame, causes, findings, lanes. Pure."""
