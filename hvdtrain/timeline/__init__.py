"""What a run's traces say: read, merged, analysed, predicted, told. Needs no torch and no Horovod, prints nothing."""
