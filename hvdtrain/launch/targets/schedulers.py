"""Schedulers: srun inside an allocation of Slurm, and scripts for ``sbatch``, ``qsub`` of PBS and ``bsub`` of LSF.

srun connects ranks by PMI where Slurm and the MPI share one; else the script starts our own driver, over Gloo. Options
from srun(1) and sbatch(1) of Slurm 22.05. Since that version srun does not inherit the cores per task of the
allocation, so they are repeated. A step inside a step, as in ``srun --pty bash``, waits for ever without ``--overlap``.

Inside jobs of PBS and LSF ranks start by MPI with a file of hosts, or by our own driver. Directives from qsub(1B) of
OpenPBS 23 and bsub(1) of LSF 10.1. ``$PBS_NODEFILE`` has a line per ``mpiprocs`` of a host, ``$LSB_DJOB_HOSTFILE`` one
per slot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import Command, JobSpec, Mpi, Script, Shell, join
from hvdtrain.launch.targets import base, mpi
from hvdtrain.launch.targets.base import Target
from hvdtrain.launch.variables import FOUND_BY, passed_variables
from hvdtrain.runtime.environment import STOP_ON_USR1

_PREFLIGHT_S = 180  # time for the preflight and the start of its ranks: its own limit is 120 s
_IMAGE_S = 1800  # the same where each node first fetches the image

COUNTS = """'{ slots[$1]++ } END { for (host in slots) { printf "%s%s:%d", comma, host, slots[host]; comma = "," } }'"""
"""A program of awk: from lines that name a host per slot to ``a:4,b:4``."""


def render_slurm(spec: JobSpec) -> Script:
    """Return the script of a job."""
    command, start = _own_driver if spec.mpi is None else _srun_command, replace(spec, pass_on=())  # Slurm passes all
    check = replace(start, arguments=("preflight", "--write", Shell('"$bad"')), is_program=False)
    text = base.fill(
        "slurm.sh.j2",
        spec=spec,
        batch=spec.batch,
        line=join(command(start)),
        variables=_srun_variables(spec),
        preflight=join(command(check)) if spec.batch.preflight else "",
        preflight_s=_IMAGE_S if spec.container else _PREFLIGHT_S,
    )
    return Script(text, ("sbatch",))


def render_srun(spec: JobSpec) -> Command:
    """Return the start by srun."""
    return Command(_srun_command(spec), _srun_variables(spec))


def _srun_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for srun's environment. Open MPI has no option for its interface under srun."""
    is_open_mpi = spec.mpi is not None and spec.mpi.flavour == "openmpi"
    own = {"OMPI_MCA_btl_tcp_if_include": spec.interface} if is_open_mpi and spec.interface else {}
    return {**base.network_variables(spec), **own}


def _srun_command(spec: JobSpec) -> tuple[str, ...]:
    words = [*base.srun_argv(spec), f"--mpi={spec.slurm_mpi}", f"--ntasks={spec.ranks}", f"--nodes={spec.nodes}"]
    if spec.nodes > 1 and len(set(spec.hosts.values())) < 2 and spec.ranks % spec.nodes == 0:
        words += [f"--ntasks-per-node={spec.ranks_per_node}"]
    words += [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    # By default srun binds each rank to one core, which all threads of the rank then share.
    # Its own distribution alternates between sockets, against the order of the GPUs.
    of_cores = [f"--cpus-per-task={spec.cpus_per_rank}", "--distribution=block:block"]
    words += of_cores if spec.cpus_per_rank else ["--cpu-bind=none"]
    words += ["--overlap"] if spec.in_step else []
    return (*words, "--kill-on-bad-exit=1", "--export=ALL", *spec.launcher_arguments, *base.rank_argv(spec))


def _mpi_by_pmi(machine: Machine, in_image: bool) -> tuple[Mpi | None, str]:
    """Return the MPI of ranks that srun connects, which needs no mpirun; or None and why srun cannot."""
    mpi = machine.own_mpi or machine.srun_mpi or (machine.mpi_for_image if in_image else None)
    if mpi is None:
        return None, "there is no MPI that Horovod uses"
    if machine.slurm_mpi_for(mpi):
        return mpi, ""
    if machine.pmi:
        return None, f"--pmi is {machine.pmi}"
    if mpi.flavour == "intelmpi" and not machine.intel_pmi:
        return None, f"{mpi} needs Slurm's PMI library (export I_MPI_PMI_LIBRARY=/path/to/libpmi2.so)"
    return None, f"srun has no PMI of {mpi} (srun --mpi=list: {', '.join(machine.slurm_mpi) or 'none'})"


def _choose_for_srun(machine: Machine, in_image: bool) -> base.Pick:
    """Pick the MPI of ranks that srun starts. Errors: LaunchError if srun cannot connect them."""
    mpi, why = _mpi_by_pmi(machine, in_image)
    if mpi is None:
        raise LaunchError(f"srun cannot connect the ranks: {why}", next_step="--to hvdtrain, which uses Gloo")
    return mpi, ""


def _choose_for_slurm(machine: Machine, in_image: bool) -> base.Pick:
    """Pick the MPI of a script's ranks, or None for our driver. Errors: LaunchError if containers or --pmi need one."""
    mpi, why = _mpi_by_pmi(machine, in_image)
    if mpi is None and (in_image or machine.pmi not in ("", "none")):
        raise LaunchError(
            f"srun cannot connect the ranks: {why}",
            expected="an MPI on PATH, in containers of the image's kind, and a PMI of it in srun --mpi=list",
            next_step="load the module of that MPI",
        )
    return mpi, f"; by our own driver, over Gloo, as {why}" if mpi is None else ""


def render_pbs(spec: JobSpec) -> Script:
    """Return the script of a job of PBS. It submits itself again by qsub(1B), ``-W depend``."""
    cores = (spec.cpus_per_rank or 1) * spec.ranks_per_node
    values = _start_values(spec, "PBS_NODEFILE")
    again = {"id": "PBS_JOBID", "submit": 'qsub -W "depend=afterany:$PBS_JOBID"'}
    return Script(base.fill("pbs.sh.j2", **values, **again, cores=cores), ("qsub",))


def render_lsf(spec: JobSpec) -> Script:
    """Return the script of a job of LSF. It submits itself again by bsub(1), ``-w``."""
    values, time_s = _start_values(spec, "LSB_DJOB_HOSTFILE"), spec.batch.time_s
    again = {"id": "LSB_JOBID", "submit": 'bsub -w "ended($LSB_JOBID)"'}
    return Script(base.fill("lsf.sh.j2", **values, **again, minutes=-(-time_s // 60) if time_s else None), ("bsub",))


def _start_values(spec: JobSpec, file: str) -> dict[str, Any]:
    """Return the values for the templates. `file`: the shell variable that names the file with a line per slot.

    Errors: LaunchError.
    """
    stops = _stop_variables(spec)
    names = ",".join(name for name in spec.pass_on if name not in spec.site_variables)
    spec = replace(spec, pass_on=(*spec.pass_on, *stops))
    named = Shell(f'"${file}"')
    if spec.mpi is None:
        hosts = Shell(f'"$(awk {COUNTS} "${file}")"')
        words, variables = _own_driver(spec, "-H", hosts), dict[str, str]()
    else:
        by_file = "--hostfile" if spec.mpi.flavour == "openmpi" else "-machinefile"
        words, variables = mpi.argv(spec, (by_file, named)), mpi.variables(spec)
    batch = spec.batch
    return {
        "spec": spec,
        "batch": batch,
        "names": names,
        "variables": {**variables, **stops},
        "signal": "USR1" if stops else "TERM",
        "line": join(words),
        "notice_after_s": batch.time_s - batch.notice_s if batch.time_s and spec.trains else None,
    }


def _own_driver(spec: JobSpec, *hosts: str) -> tuple[str, ...]:
    """Return the command line of our own driver in a script, which already follows the site's profile.

    `hosts`: options that name them, where it does not find those of the allocation. Errors: LaunchError.
    """
    if spec.launcher_arguments:
        raise LaunchError("--launcher-arg is for srun and mpirun, and without an MPI our own driver starts the ranks")
    argv = (spec.python, "-m", "hvdtrain", "launch", "--site", "none", "--to", "hvdtrain", "-np", str(spec.ranks))
    by = [*(("--interface", spec.interface) if spec.interface else ())]
    by += ["--agents", spec.agents] if spec.agents != "auto" else []
    asked = [name for name in spec.pass_on if name not in FOUND_BY and not passed_variables({name: ""})]
    env = [word for name in asked for word in ("--env", name)]
    return (*argv, *hosts, *by, *env, "--", *spec.own_arguments)


def _refuse_start(spec: JobSpec, to: str) -> None:
    """Raise LaunchError for containers without an MPI, and for GPUs with one core a rank, the default here."""
    if spec.gpus_per_node and not spec.cpus_per_rank and to == "pbs":
        raise LaunchError(
            f"--to {to} would give each rank one core, which is too little to load data for a GPU",
            expected="the cores of each rank: those of a host divided by its ranks",
            next_step="--cpus-per-rank 8, for example",
        )
    if spec.container and spec.mpi is None:
        raise LaunchError(
            f"--to {to} needs an mpirun to start ranks in containers, and found none that Horovod uses",
            expected="an MPI on PATH, of a version that fits the MPI in the image",
            next_step="load the module of that MPI",
        )


def _stop_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables by which SIGUSR1 makes ranks of MPI save and stop, in a job that submits itself again.

    mpirun forwards SIGUSR1, but kills the ranks soon after a SIGTERM. Our own driver stops them at SIGTERM. Errors:
    LaunchError if the job cannot submit itself again.
    """
    if not spec.batch.resubmissions:
        return {}
    wrong = "" if spec.trains else f"{spec.arguments[0]!r} after --"
    if wrong or not spec.batch.time_s:
        raise LaunchError(
            "a job of PBS or LSF submits itself again only after a notice before its time limit, to train on",
            expected="--requeues with --time, for training",
            found=wrong or "no --time",
            next_step="omit --requeues, and submit it again to resume",
        )
    return {STOP_ON_USR1: "1"} if spec.mpi is not None else {}


def _inside_slurm(machine: Machine) -> str:
    return "inside an allocation of Slurm" if machine.in_slurm and machine.srun else ""


_SRUN = base.CONTAINER | {"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "interface", "env", "launcher_arg", "pmi"}
_TAKES = base.SCHEDULED | {"notice", "requeues", "interface"}
_SLURM, _PBS, _LSF = _TAKES | {"mem", "preflight", "pmi"}, _TAKES | {"mem", "chunk", "agents"}, _TAKES | {"agents"}
SRUN = Target("srun", render_srun, _SRUN, choose=_choose_for_srun, auto=_inside_slurm, by_srun=True)
SLURM = Target("slurm", render_slurm, _SLURM, choose=_choose_for_slurm, even=True, by_srun=True, shows_variables=True)
PBS = Target("pbs", render_pbs, _PBS, refuse=_refuse_start, even=True, shows_variables=True)
LSF = Target("lsf", render_lsf, _LSF, refuse=_refuse_start, even=True, shows_variables=True)
