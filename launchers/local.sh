#!/bin/sh
# Train on this machine, by Horovod's MPI, or without MPI where there is none.
#   launchers/local.sh --config run.yaml
#   NP=8 launchers/local.sh --config run.yaml
# A dead rank ends this job. A job that continues:  hvdtrain launch -np 4 --elastic 2:4 -- ...
exec hvdtrain launch -np "${NP:-2}" -- "$@"
