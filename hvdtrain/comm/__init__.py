"""Collectives among the ranks of a job."""
