"""The variables that launchers really set, as printed by their ranks; those that play no part are left out.

Seen with: Open MPI 4.1.8 and 5.0.11, MPICH 5.0.2, Intel MPI 2021, Horovod 0.28.1, Slurm 22.05; two ranks on one host.
"""

from __future__ import annotations


def _open_mpi(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(rank),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_NUM_APP_CTX": "1",
        "OMPI_UNIVERSE_SIZE": "2",
        "PMIX_RANK": str(rank),
    }


def open_mpi_4(rank: int) -> dict[str, str]:
    return _open_mpi(rank) | {
        "OMPI_APP_CTX_NUM_PROCS": "2",
        "OMPI_MCA_ess": "^singleton",
        "OMPI_MCA_ess_base_jobid": "2033254401",
        "OMPI_MCA_ess_base_vpid": str(rank),
        "OMPI_MCA_mpi_oversubscribe": "0",
        "OMPI_MCA_orte_ess_num_procs": "2",
        "OMPI_MCA_orte_launch": "1",
        "OMPI_MCA_pmix": "^s1,s2,cray,isolated",
        "PMIX_NAMESPACE": "2033254401",
        "PMIX_VERSION": "3.2.5a1",
    }


def open_mpi_5(rank: int) -> dict[str, str]:
    return _open_mpi(rank) | {
        "OMPI_MCA_cpu_type": "x86_64",
        "OMPI_MCA_num_procs": "2",
        "OMPI_TOOL_NAME": "mpirun",
        "OMPI_VERSION": "5.0.11",
        "OMPI_WORLD_LOCAL_SIZE": "2",
        "OMPI_WORLD_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-node-5591@1",
        "PMIX_VERSION": "5.0.11rc1",
        "PRTE_LAUNCHED": "1",
        "PRTE_SHARED_FS": "FALSE",
    }


def mpich(rank: int) -> dict[str, str]:
    return {
        "HYDI_CONTROL_FD": "7",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank),
        "PMI_FD": str(9 + 2 * rank),
        "PMI_HOSTNAME": "node",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
    }


def intel_mpi(rank: int) -> dict[str, str]:
    return {
        "HYDRA_BSTRAP_LOCALHOST": "node",
        "HYDRA_LAUNCH_TYPE": "2",
        "I_MPI_MPIRUN": "mpirun",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank),
        "PMI_FD": str(9 + 2 * rank),
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
    }


def horovodrun_gloo(rank: int) -> dict[str, str]:
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "51273",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": "2",
    }


def salloc_shell() -> dict[str, str]:
    return {
        "SLURM_JOBID": "4",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "node",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_TASKS_PER_NODE": "2",
    }


def sbatch_script() -> dict[str, str]:
    return salloc_shell() | {
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_GTIDS": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_TASK_PID": "8977",
    }


def srun(rank: int) -> dict[str, str]:
    return sbatch_script() | {
        "SLURM_GTIDS": "0,1",
        "SLURM_LOCALID": str(rank),
        "SLURM_PROCID": str(rank),
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }


def srun_pmix(rank: int) -> dict[str, str]:
    return srun(rank) | {"PMIX_NAMESPACE": "slurm.pmix.2.0", "PMIX_RANK": str(rank), "PMIX_VERSION": "4.2.2"}


def srun_pmi2(rank: int) -> dict[str, str]:
    return srun(rank) | {"PMI_FD": "11", "PMI_JOBID": "2.0", "PMI_RANK": str(rank), "PMI_SIZE": "2"}


def mpirun_in_salloc(rank: int) -> dict[str, str]:
    return salloc_shell() | open_mpi_4(rank)


def mpirun_by_srun(rank: int) -> dict[str, str]:
    """Open MPI's daemon as the one task of an srun step: its ranks inherit the step's variables."""
    return srun(0) | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"} | open_mpi_4(rank)


def hydra_by_srun(rank: int) -> dict[str, str]:
    """MPICH's proxy in the same way."""
    return srun(0) | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"} | mpich(rank)


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
