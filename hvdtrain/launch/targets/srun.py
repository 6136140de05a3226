"""srun, inside an allocation of Slurm: by PMI where Slurm and the MPI share one, else over Gloo.

Options from srun(1) of Slurm 22.05. Since that version srun does not inherit the cores per task of the allocation, so
they are repeated. A step inside a step, as in ``srun --pty bash``, waits for ever without ``--overlap``.
"""

from __future__ import annotations

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import NO_PMI, Machine
from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets.base import CONTAINER, Pick, Target, network_variables
from hvdtrain.launch.targets.container import rank_argv, srun_argv


def render(spec: JobSpec) -> Command:
    """Return the start by srun."""
    return Command(argv(spec), variables(spec))


def variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for srun's environment. Open MPI has no option for its interface under srun."""
    over_mpi = spec.slurm_mpi != "" and spec.mpi is not None and spec.mpi.flavour == "openmpi"
    own = {"OMPI_MCA_btl_tcp_if_include": spec.interface} if over_mpi and spec.interface else {}
    return {**network_variables(spec), **own}


def argv(spec: JobSpec) -> tuple[str, ...]:
    """Return the command line."""
    over_mpi = spec.mpi is not None and spec.slurm_mpi != ""
    words = [*srun_argv(spec), f"--mpi={spec.slurm_mpi if over_mpi else 'none'}", f"--ntasks={spec.ranks}"]
    words += [f"--nodes={spec.nodes}"]
    if spec.nodes > 1 and len(set(spec.hosts.values())) < 2 and spec.ranks % spec.nodes == 0:
        words += [f"--ntasks-per-node={spec.ranks_per_node}"]
    words += [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    # By default srun binds each rank to one core, which all threads of the rank then share.
    # Its own distribution alternates between sockets, against the order of the GPUs.
    of_cores = [f"--cpus-per-task={spec.cpus_per_rank}", "--distribution=block:block"]
    words += of_cores if spec.cpus_per_rank else ["--cpu-bind=none"]
    words += ["--overlap"] if spec.in_step else []
    words += ["--kill-on-bad-exit=1", "--export=ALL", *spec.launcher_arguments]
    if over_mpi:
        return (*words, *rank_argv(spec))
    by = ["--interface", spec.interface] if spec.interface else []
    own = (spec.python, "-m", "hvdtrain.launch.srun_job", *by)
    return (*own, *words, *rank_argv(spec, spec.rank_python, "-m", "hvdtrain.launch.slurm_task"))


def choose(machine: Machine, in_image: bool) -> Pick:
    """Pick the MPI of ranks that srun starts: it needs no mpirun. The note says where they use Gloo instead.

    Errors:
        LaunchError: a PMI was requested for containers, and this machine has no MPI.
    """
    mpi = machine.own_mpi or machine.srun_mpi
    if mpi is None and in_image and machine.pmi not in ("", NO_PMI):
        mpi = machine.mpi_for_image
        if mpi is None:
            raise LaunchError(
                f"--pmi {machine.pmi} connects the ranks of an MPI, and this machine has none",
                expected="an MPI on PATH of the same kind as that of the image",
                next_step="load its module; or --pmi none, for Gloo",
            )
    if mpi is None or machine.slurm_mpi_for(mpi):
        return mpi, ""
    if machine.pmi:
        return mpi, f"; over Gloo, by --pmi {machine.pmi}"
    if mpi.flavour == "intelmpi" and not machine.intel_pmi:
        why = f"{mpi} needs Slurm's PMI library (export I_MPI_PMI_LIBRARY=/path/to/libpmi2.so)"
    else:
        why = f"srun has no PMI of {mpi} (srun --mpi=list: {', '.join(machine.slurm_mpi) or 'none'})"
    return mpi, f"; over Gloo, as {why}"


def inside_slurm(machine: Machine) -> str:
    """Return why ``--to auto`` chooses it; "" outside of an allocation."""
    return "inside an allocation of Slurm" if machine.in_slurm and "srun" in machine.programs else ""


_TAKES = frozenset({"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "interface", "env", "launcher_arg", "pmi"})
TARGET = Target("srun", render, takes=_TAKES | CONTAINER, choose=choose, auto=inside_slurm, by_srun=True)
