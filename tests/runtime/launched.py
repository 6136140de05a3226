"""The variables that launchers really set, as printed by their ranks; those that play no part are left out.

Seen with: Open MPI 4.1.8 and 5.0.11, MPICH 5.0.2, Intel MPI 2021, Horovod 0.28.1, Slurm 22.05; two ranks on one host.
"""

from __future__ import annotations


def _variables(printed: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in printed.split())


def _open_mpi(rank: int) -> dict[str, str]:
    return _variables(f"""
        OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK={rank}
        OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_UNIVERSE_SIZE=2 PMIX_RANK={rank}
    """)


def open_mpi_4(rank: int) -> dict[str, str]:
    return _open_mpi(rank) | _variables("""
        OMPI_MCA_ess=^singleton OMPI_MCA_mpi_oversubscribe=0 OMPI_MCA_orte_ess_num_procs=2 OMPI_MCA_orte_launch=1
        PMIX_NAMESPACE=2033254401 PMIX_VERSION=3.2.5a1
    """)


def open_mpi_5(rank: int) -> dict[str, str]:
    return _open_mpi(rank) | _variables("""
        OMPI_MCA_num_procs=2 OMPI_TOOL_NAME=mpirun OMPI_VERSION=5.0.11 OMPI_WORLD_LOCAL_SIZE=2 OMPI_WORLD_SIZE=2
        PMIX_NAMESPACE=prterun-node-5591@1 PMIX_VERSION=5.0.11rc1 PRTE_LAUNCHED=1
    """)


def _hydra(rank: int) -> dict[str, str]:
    return _variables(f"""
        MPI_LOCALNRANKS=2 MPI_LOCALRANKID={rank} PMI_FD={9 + 2 * rank} PMI_RANK={rank} PMI_SIZE=2
    """)


def mpich(rank: int) -> dict[str, str]:
    return _hydra(rank) | {"HYDI_CONTROL_FD": "7", "PMI_HOSTNAME": "node"}


def intel_mpi(rank: int) -> dict[str, str]:
    return _hydra(rank) | {"HYDRA_BSTRAP_LOCALHOST": "node", "HYDRA_LAUNCH_TYPE": "2", "I_MPI_MPIRUN": "mpirun"}


def horovodrun_gloo(rank: int) -> dict[str, str]:
    return _variables(f"""
        HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo HOROVOD_CROSS_RANK=0 HOROVOD_CROSS_SIZE=1
        HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=51273 HOROVOD_HOSTNAME=localhost
        HOROVOD_LOCAL_RANK={rank} HOROVOD_LOCAL_SIZE=2 HOROVOD_RANK={rank} HOROVOD_SIZE=2
    """)


def salloc_shell() -> dict[str, str]:
    return _variables("""
        SLURM_JOBID=4 SLURM_NNODES=1 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2
    """)


def sbatch_script() -> dict[str, str]:
    return salloc_shell() | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_TASK_PID": "8977"}


def srun(rank: int) -> dict[str, str]:
    return sbatch_script() | _variables(f"""
        SLURM_LOCALID={rank} SLURM_PROCID={rank} SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2
        SLURM_STEP_TASKS_PER_NODE=2
    """)


def srun_pmix(rank: int) -> dict[str, str]:
    return srun(rank) | {"PMIX_NAMESPACE": "slurm.pmix.2.0", "PMIX_RANK": str(rank), "PMIX_VERSION": "4.2.2"}


def srun_pmi2(rank: int) -> dict[str, str]:
    return srun(rank) | {"PMI_FD": "11", "PMI_JOBID": "2.0", "PMI_RANK": str(rank), "PMI_SIZE": "2"}


def mpirun_in_salloc(rank: int) -> dict[str, str]:
    return salloc_shell() | open_mpi_4(rank)


def one_task() -> dict[str, str]:
    """A step of srun with one task."""
    return srun(0) | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


def mpirun_by_srun(rank: int) -> dict[str, str]:
    """Open MPI's daemon as the one task of an srun step: its ranks inherit the step's variables."""
    return one_task() | open_mpi_4(rank)


def hydra_by_srun(rank: int) -> dict[str, str]:
    """MPICH's proxy in the same way."""
    return one_task() | mpich(rank)


LAUNCHED = {
    open_mpi_4: "openmpi",
    open_mpi_5: "openmpi",
    mpich: "hydra",
    intel_mpi: "hydra",
    horovodrun_gloo: "horovod-gloo",
    srun: "slurm",
    srun_pmi2: "slurm",
    srun_pmix: "slurm",
    mpirun_in_salloc: "openmpi",
    mpirun_by_srun: "openmpi",
    hydra_by_srun: "hydra",
}
