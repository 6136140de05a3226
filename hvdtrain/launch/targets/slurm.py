"""Slurm: srun inside an allocation, and a script for ``sbatch``, which requeues itself before its time limit.

srun connects ranks by PMI where Slurm and the MPI share one, else they use Gloo. Options from srun(1) and sbatch(1) of
Slurm 22.05. Since that version srun does not inherit the cores per task of the allocation, so they are repeated. A step
inside a step, as in ``srun --pty bash``, waits for ever without ``--overlap``.
"""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import NO_PMI, Machine
from hvdtrain.launch.spec import Command, JobSpec, Script, Shell, join
from hvdtrain.launch.targets.base import (
    CONTAINER,
    SCHEDULED,
    Pick,
    Target,
    clock,
    fill,
    insert_array_index,
    network_variables,
    rank_argv,
    srun_argv,
)

_PREFLIGHT_S = 180
"""Time for the preflight and the start of its ranks: its own limit is 120 s."""
_IMAGE_S = 1800
"""The same where each node first fetches the image."""


def render(spec: JobSpec) -> Script:
    """Return the script of a job."""
    line = join(insert_array_index(word, "SLURM_ARRAY_TASK_ID") for word in _argv(spec))
    check = replace(spec, arguments=("preflight", "--write", Shell('"$bad"')), is_program=False)
    text = fill(
        "slurm.sh.j2",
        spec=spec,
        batch=spec.batch,
        line=line,
        variables=_variables(spec),
        clock=clock,
        preflight=join(_argv(check)) if spec.batch.preflight else "",
        preflight_s=_IMAGE_S if spec.container else _PREFLIGHT_S,
    )
    return Script(text, ("sbatch",))


def render_srun(spec: JobSpec) -> Command:
    """Return the start by srun."""
    return Command(_argv(spec), _variables(spec))


def _variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for srun's environment. Open MPI has no option for its interface under srun."""
    over_mpi = spec.slurm_mpi != "" and spec.mpi is not None and spec.mpi.flavour == "openmpi"
    own = {"OMPI_MCA_btl_tcp_if_include": spec.interface} if over_mpi and spec.interface else {}
    return {**network_variables(spec), **own}


def _argv(spec: JobSpec) -> tuple[str, ...]:
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

    Errors: LaunchError if a PMI was requested for containers, and this machine has no MPI.
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


def _inside_slurm(machine: Machine) -> str:
    return "inside an allocation of Slurm" if machine.in_slurm and "srun" in machine.programs else ""


_TAKES = CONTAINER | {"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "interface", "env", "launcher_arg", "pmi"}
SRUN = Target("srun", render_srun, _TAKES, choose=choose, auto=_inside_slurm, by_srun=True)
_TAKES = SCHEDULED | {"array", "notice", "requeues", "interface", "mem", "preflight", "pmi"}
SLURM = Target("slurm", render, _TAKES, choose=choose, even=True, by_srun=True, shows_variables=True)
