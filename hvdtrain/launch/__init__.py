"""Start jobs by MPI, schedulers or hvdtrain's own driver, which can be elastic."""
