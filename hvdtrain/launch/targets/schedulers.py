"""Schedulers: srun inside an allocation of Slurm, and scripts for ``sbatch``, ``qsub`` of PBS and ``bsub`` of LSF.

srun connects ranks by PMI where Slurm and the MPI share one, else they use Gloo. Options from srun(1) and sbatch(1) of
Slurm 22.05. Since that version srun does not inherit the cores per task of the allocation, so they are repeated. A step
inside a step, as in ``srun --pty bash``, waits for ever without ``--overlap``.

Inside jobs of PBS and LSF ranks start by MPI with a file of hosts, or by our own driver. Directives from qsub(1B) of
OpenPBS 23 and bsub(1) of LSF 10.1. ``$PBS_NODEFILE`` has a line per ``mpiprocs`` of a host, ``$LSB_DJOB_HOSTFILE`` one
per slot. LSF's arrays start at index 1. Where LSF allocates whole hosts (IBM's CSM), jsrun starts the ranks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import NO_PMI, Machine
from hvdtrain.launch.spec import Command, JobSpec, Script, Shell, join
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
    line = join(base.insert_array_index(word, "SLURM_ARRAY_TASK_ID") for word in _srun_command(spec))
    check = replace(spec, arguments=("preflight", "--write", Shell('"$bad"')), is_program=False)
    text = base.fill(
        "slurm.sh.j2",
        spec=spec,
        batch=spec.batch,
        line=line,
        variables=_srun_variables(spec),
        preflight=join(_srun_command(check)) if spec.batch.preflight else "",
        preflight_s=_IMAGE_S if spec.container else _PREFLIGHT_S,
    )
    return Script(text, ("sbatch",))


def render_srun(spec: JobSpec) -> Command:
    """Return the start by srun."""
    return Command(_srun_command(spec), _srun_variables(spec))


def _srun_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables for srun's environment. Open MPI has no option for its interface under srun."""
    over_mpi = spec.slurm_mpi != "" and spec.mpi is not None and spec.mpi.flavour == "openmpi"
    own = {"OMPI_MCA_btl_tcp_if_include": spec.interface} if over_mpi and spec.interface else {}
    return {**base.network_variables(spec), **own}


def _srun_command(spec: JobSpec) -> tuple[str, ...]:
    over_mpi = spec.mpi is not None and spec.slurm_mpi != ""
    words = [*base.srun_argv(spec), f"--mpi={spec.slurm_mpi if over_mpi else 'none'}", f"--ntasks={spec.ranks}"]
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
        return (*words, *base.rank_argv(spec))
    by = ["--interface", spec.interface] if spec.interface else []
    own = (spec.python, "-m", "hvdtrain.launch.srun_job", *by)
    return (*own, *words, *base.rank_argv(spec, spec.rank_python, "-m", "hvdtrain.launch.slurm_task"))


def _choose_for_srun(machine: Machine, in_image: bool) -> base.Pick:
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


def render_pbs(spec: JobSpec) -> Script:
    """Return the script of a job of PBS. It submits itself again by qsub(1B), ``-W depend``."""
    if "," in (spec.batch.array or ""):
        raise LaunchError("an array of PBS is one range", expected="--array 0-3", found=f"--array {spec.batch.array}")
    cores = (spec.cpus_per_rank or 1) * spec.ranks_per_node
    values = _start_values(spec, "PBS_NODEFILE", "PBS_ARRAY_INDEX")
    again = {"id": "PBS_JOBID", "submit": 'qsub -W "depend=afterany:$PBS_JOBID"'}
    return Script(base.fill("pbs.sh.j2", **values, **again, cores=cores), ("qsub",))


def render_lsf(spec: JobSpec) -> Script:
    """Return the script of a job of LSF. It submits itself again by bsub(1), ``-w``."""
    array, time_s = spec.batch.array, spec.batch.time_s
    if array and 0 in map(int, re.split("[-,%]", array)):
        raise LaunchError("LSF's arrays start at index 1", expected="--array 1-4", found=f"--array {array}")
    values = _start_values(spec, "LSB_DJOB_HOSTFILE", "LSB_JOBINDEX")
    if spec.batch.jsrun:
        values["line"] = join(base.insert_array_index(word, "LSB_JOBINDEX") for word in _by_jsrun(spec))
        values["variables"] = {**base.network_variables(spec), **_stop_variables(spec)}
    again = {"id": "LSB_JOBID", "submit": 'bsub -w "ended($LSB_JOBID)"'}
    return Script(base.fill("lsf.sh.j2", **values, **again, minutes=-(-time_s // 60) if time_s else None), ("bsub",))


def _by_jsrun(spec: JobSpec) -> tuple[str, ...]:
    """Return the command line of jsrun: one resource set per rank, with its GPU."""
    words = ["jsrun", "--nrs", str(spec.ranks), "--rs_per_host", str(spec.ranks_per_node), "--tasks_per_rs", "1"]
    words += ["--cpu_per_rs", str(spec.cpus_per_rank)] if spec.cpus_per_rank else []
    words += ["--gpu_per_rs", "1"] if spec.gpus_per_node else []
    return (*words, "--bind", "none", *spec.launcher_arguments, *base.rank_argv(spec))


def _start_values(spec: JobSpec, file: str, index: str) -> dict[str, Any]:
    """Return the values for the templates. Errors: LaunchError.

    `file`: the shell variable that names the file with a line per slot; `index`: that with the index in an array.
    """
    stops = _stop_variables(spec)
    names = ",".join(name for name in spec.pass_on if name not in spec.site_variables)
    spec = replace(spec, pass_on=(*spec.pass_on, *stops))
    named = Shell(f'"${file}"')
    if spec.mpi is None:
        if spec.launcher_arguments:
            raise LaunchError(
                "--launcher-arg is for srun and mpirun, and without an MPI our own driver starts the ranks"
            )
        hosts = Shell(f'"$(awk {COUNTS} "${file}")"')
        # This script already follows the site's profile.
        argv = (spec.python, "-m", "hvdtrain", "launch", "--site", "none", "--to", "hvdtrain", "-np", str(spec.ranks))
        by = [*(("--interface", spec.interface) if spec.interface else ())]
        by += ["--agents", spec.agents] if spec.agents != "auto" else []
        asked = [name for name in spec.pass_on if name not in FOUND_BY and not passed_variables({name: ""})]
        env = [word for name in asked for word in ("--env", name)]
        words, variables = (*argv, "-H", hosts, *by, *env, "--", *spec.own_arguments), dict[str, str]()
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
        "line": join(base.insert_array_index(word, index) for word in words),
        "notice_after_s": batch.time_s - batch.notice_s if batch.time_s and spec.trains else None,
    }


def _refuse_start(spec: JobSpec, to: str) -> None:
    """Raise LaunchError for containers without an MPI, and for GPUs with one core a rank, the default here."""
    if spec.gpus_per_node and not spec.cpus_per_rank and (to == "pbs" or spec.batch.jsrun):
        raise LaunchError(
            f"--to {to} would give each rank one core, which is too little to load data for a GPU",
            expected="the cores of each rank: those of a host divided by its ranks",
            next_step="--cpus-per-rank 8, for example",
        )
    if spec.container and spec.mpi is None and (to == "pbs" or not spec.batch.jsrun):
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
    wrong = "--array" if spec.batch.array else "" if spec.trains else f"{spec.arguments[0]!r} after --"
    if wrong or not spec.batch.time_s:
        raise LaunchError(
            "a job of PBS or LSF submits itself again only after a notice before its time limit, to train on",
            expected="--requeues with --time, for training and without --array",
            found=wrong or "no --time",
            next_step="omit --requeues, and submit it again to resume",
        )
    return {STOP_ON_USR1: "1"} if spec.mpi is not None or spec.batch.jsrun else {}


def _inside_slurm(machine: Machine) -> str:
    return "inside an allocation of Slurm" if machine.in_slurm and "srun" in machine.programs else ""


_SRUN = base.CONTAINER | {"hosts", "nodes", "gpus_per_node", "cpus_per_rank", "interface", "env", "launcher_arg", "pmi"}
_TAKES = base.SCHEDULED | {"array", "notice", "requeues", "interface"}
_SLURM, _PBS, _LSF = _TAKES | {"mem", "preflight", "pmi"}, _TAKES | {"mem", "chunk", "agents"}, _TAKES | {"agents"}
SRUN = Target("srun", render_srun, _SRUN, choose=_choose_for_srun, auto=_inside_slurm, by_srun=True)
SLURM = Target("slurm", render_slurm, _SLURM, choose=_choose_for_srun, even=True, by_srun=True, shows_variables=True)
PBS = Target("pbs", render_pbs, _PBS, refuse=_refuse_start, even=True, shows_variables=True)
LSF = Target("lsf", render_lsf, _LSF, refuse=_refuse_start, even=True, shows_variables=True)
