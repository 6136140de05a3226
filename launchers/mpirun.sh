#!/bin/sh
# Train on hosts that ssh reaches, by mpirun of Open MPI:
#   NP=8 HOSTS=a:4,b:4 launchers/mpirun.sh --config run.yaml
# The project, its environment and this folder must be on all hosts, under the same path. Further options of mpirun, where needed:
#   --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0      which network, if there are several (oob: version 4)
#   -x NCCL_DEBUG -x HF_HOME                                         variables that ranks on other hosts get
# hvdtrain launch --to openmpi -H a:4,b:4 --dry-run -- ...           shows the command that it would run here
np=${NP:?number of ranks, such as NP=8} hosts=${HOSTS:?hosts and their slots, such as HOSTS=a:4,b:4}
exec "$(command -v mpirun)" -np "$np" --host "$hosts" --map-by slot --bind-to none -x PATH python -m hvdtrain "$@"
