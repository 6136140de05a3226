#!/bin/bash
#BSUB -J hvdtrain
#BSUB -n 16
#BSUB -R "span[ptile=8] affinity[core(8)]"
#BSUB -gpu "num=8:j_exclusive=yes"
#BSUB -W 120
#BSUB -o hvdtrain.%J.out
#BSUB -r
#BSUB -env "PATH"
cd -- "${LS_SUBCWD:-.}" || exit
# module load openmpi cuda
export PATH="$PWD/.venv/bin:$PATH"
# 120 s before the limit all ranks save a checkpoint and continue. Submit the same job again to resume from there.
exec timeout --foreground --preserve-status --signal=USR1 "$((7080 > SECONDS ? 7080 - SECONDS : 1))" "$(command -v mpirun)" -np 16 --hostfile "$LSB_DJOB_HOSTFILE" --map-by slot --bind-to none -x PATH python -m hvdtrain --config run.yaml --parallel.device cuda
