"""Building Horovod for the torch and MPI at hand."""
