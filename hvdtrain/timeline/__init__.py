"""Traces of a run: read, merge, analyse, predict, report. Needs neither torch nor Horovod; prints nothing."""
