"""Build Horovod for the installed torch and MPI, and describe the build that is installed."""
