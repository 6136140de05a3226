"""One job for each way to start one: what the golden files of tests/launch hold."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.launch.spec import Batch, Container, JobSpec, Mpi

OPEN_MPI_4 = Mpi("openmpi", "4.1.8", "mpirun", "/venv")
OPEN_MPI_5 = Mpi("openmpi", "5.0.11", "/opt/ompi5/bin/mpirun")
MPICH = Mpi("mpich", "5.0.2")
INTEL = Mpi("intelmpi", "2021.17", "/opt/intel/bin/mpirun")
ARGUMENTS = ("--config", "run it's.yaml", "--train.steps", "100")
PASSED = ("PATH", "HF_HOME", "SECRET")


def one(mpi: Mpi | None = None, ranks: int = 2, **more: object) -> JobSpec:
    made = JobSpec(ARGUMENTS, ranks, python="/venv/bin/python", folder="/home/me/my work", mpi=mpi)
    return replace(made, **more)  # type: ignore[arg-type]


def two(mpi: Mpi | None = None, **more: object) -> JobSpec:
    reach = {"interface": "eth0", "ssh_port": 2022, "ssh_options": ("-i", "/key"), "pass_on": PASSED}
    return one(mpi, 8, nodes=2, hosts={"a": 4, "b": 4}, **{**reach, **more})


def queued(mpi: Mpi | None = None, batch: Batch | None = None, **more: object) -> JobSpec:
    """A job for a scheduler: four hosts of eight GPUs."""
    asked = Batch(
        time_s=7200, queue="gpu", account="me", directives=("--qos=high",), setup=("module load cuda",), notice_s=300
    )
    there = {"nodes": 4, "gpus_per_node": 8, "cpus_per_rank": 6, "pass_on": PASSED}
    return one(mpi, 32, batch=batch or asked, **{**there, **more})


SIF = Container("/images/it's.sif", "apptainer", ("/data:/data:ro", "/my scratch:/scratch"))
WITH_GPUS = replace(SIF, gpus=True)
BY_PYXIS = Container("nvcr.io#lab/hvdtrain:1", "pyxis", ("/data:/data:ro", "/scratch:/tmp/s"), True, ("HF_HOME",))

JOBS: dict[str, tuple[str, JobSpec]] = {
    "openmpi4": ("openmpi", one(OPEN_MPI_4, is_root=True)),
    "openmpi4-two-hosts": ("openmpi", two(OPEN_MPI_4)),
    "openmpi5-two-hosts": ("openmpi", two(OPEN_MPI_5)),
    "mpich": ("mpich", one(MPICH)),
    "mpich-two-hosts": ("mpich", two(MPICH)),
    "intelmpi-two-hosts": ("intelmpi", two(INTEL)),
    "horovodrun": ("horovodrun", one(OPEN_MPI_4, is_root=True)),
    "horovodrun-two-hosts": ("horovodrun", two(OPEN_MPI_4, ssh_options=())),
    "horovodrun-gloo": ("horovodrun", one(None)),
    "horovodrun-elastic": ("horovodrun", one(OPEN_MPI_4, elastic=(1, 4), discover="./hosts.sh")),
    "srun": ("srun", one(OPEN_MPI_4, slurm_mpi="pmix")),
    "srun-in-a-step": ("srun", one(OPEN_MPI_4, slurm_mpi="pmix", in_step=True)),
    "slurm": ("slurm", queued(OPEN_MPI_4, slurm_mpi="pmix", interface="ib0", launcher_arguments=("--label",))),
    "slurm-whole-hosts": ("slurm", queued(None, Batch(mem_mib=400 << 10), cpus_per_rank=0, is_program=True)),
    "slurm-preflight": ("slurm", queued(OPEN_MPI_4, Batch(preflight=True), slurm_mpi="pmix")),
    "pbs": ("pbs", queued(OPEN_MPI_4)),
    "pbs-gloo": ("pbs", queued(None, Batch(mem_mib=400 << 10, chunk=("host_type=a100",)))),
    "lsf": ("lsf", queued(OPEN_MPI_4, interface="ib0", launcher_arguments=("--report-bindings",))),
    "pbs-requeues": ("pbs", queued(OPEN_MPI_4, Batch(time_s=7200, resubmissions=3, setup=("module load cuda",)))),
    "lsf-requeues": ("lsf", queued(MPICH, Batch(time_s=7200, resubmissions=3))),
    "openmpi4-container": ("openmpi", two(OPEN_MPI_4, container=WITH_GPUS)),
    "mpich-container": ("mpich", one(MPICH, container=SIF)),
    "intelmpi-container": ("intelmpi", two(INTEL, container=replace(SIF, runtime="singularity"))),
    "srun-container": ("srun", one(OPEN_MPI_4, slurm_mpi="pmix", container=SIF)),
    "slurm-container": ("slurm", queued(OPEN_MPI_4, slurm_mpi="pmix", container=WITH_GPUS)),
    "slurm-pyxis": ("slurm", queued(OPEN_MPI_4, slurm_mpi="pmix", container=BY_PYXIS, folder="/me", interface="ib0")),
    "pbs-container": ("pbs", queued(OPEN_MPI_4, container=WITH_GPUS)),
    "lsf-container": ("lsf", queued(INTEL, container=WITH_GPUS, is_program=True, arguments=("python3", "a.py"))),
    "mpijob": ("mpijob", queued(OPEN_MPI_4)),
    "mpijob-rdma": ("mpijob", queued(OPEN_MPI_4, Batch(mem_mib=400 << 10, resources=(("rdma/ib", 1),)))),
    "mpijob-cpu": ("mpijob", queued(None, Batch(requeues=0), gpus_per_node=0)),
    "mpijob-elastic": ("mpijob", queued(None, Batch(image="mine:1", namespace="lab", mem_mib=9), elastic=(8, 32))),
}
"""Target and job by the name of the golden file."""
