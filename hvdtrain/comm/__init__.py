"""Collectives between the ranks of a job."""
