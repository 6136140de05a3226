"""Measurements of a run: time budget, FLOPs, profiler traces, step stamps, the report at its end."""
