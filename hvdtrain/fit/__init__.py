"""Predict the memory of a rank before a job runs."""
