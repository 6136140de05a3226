#!/bin/sh
# Train on this machine, by the MPI that Horovod speaks, or without MPI where there is none.
#   launchers/local.sh --config run.yaml
#   NP=8 launchers/local.sh --config run.yaml
# A rank that dies ends this job; for one that goes on:  hvdtrain launch -np 4 --elastic 2:4 -- ...
exec hvdtrain launch -np "${NP:-2}" -- "$@"
