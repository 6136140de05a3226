"""Link speed between and within hosts, and predicted step times."""
