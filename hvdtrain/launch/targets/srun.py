"""srun, inside an allocation of Slurm: by PMI where Slurm and the MPI share one, else over Gloo.

Options from srun(1) of Slurm 22.05. Since that version srun does not inherit the cores per task of the allocation, so
they are repeated. A step inside a step, as in ``srun --pty bash``, waits for ever without ``--overlap``.
"""

from __future__ import annotations

from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets.base import CONTAINER, Target, network_variables
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


_TAKES = frozenset({"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "interface", "env", "launcher_arg", "pmi"})
TARGET = Target("srun", render, takes=_TAKES | CONTAINER, by_srun=True)
