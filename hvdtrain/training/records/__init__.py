"""Measurements of a run: FLOPs, traces, profiles, step stamps, and the report at its end."""
