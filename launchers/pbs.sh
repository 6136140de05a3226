#!/bin/bash
#PBS -N hvdtrain
#PBS -l select=2:ncpus=64:mpiprocs=8:ngpus=8
#PBS -l place=scatter
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -r y
#PBS -v PATH
cd -- "${PBS_O_WORKDIR:-.}" || exit
# module load openmpi cuda
export PATH="$PWD/.venv/bin:$PATH"
# 120 s before the limit all ranks save a checkpoint and continue. Submit the same job again to resume from there.
exec timeout --foreground --preserve-status --signal=USR1 "$((7080 > SECONDS ? 7080 - SECONDS : 1))" "$(command -v mpirun)" -np 16 --hostfile "$PBS_NODEFILE" --map-by slot --bind-to none -x PATH python -m hvdtrain --config run.yaml --parallel.device cuda
