"""PBS and LSF: scripts for ``qsub`` and ``bsub``. Ranks start by MPI with a file of hosts, or by our own driver.

Directives from qsub(1B) of OpenPBS 23 and bsub(1) of LSF 10.1. ``$PBS_NODEFILE`` has a line per ``mpiprocs`` of a host,
``$LSB_DJOB_HOSTFILE`` one per slot. LSF's arrays start at index 1. Where LSF allocates whole hosts (IBM's CSM), jsrun
starts the ranks.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import JobSpec, Script, Shell, join
from hvdtrain.launch.targets import mpi
from hvdtrain.launch.targets.base import (
    SCHEDULED,
    Target,
    clock,
    fill,
    insert_array_index,
    network_variables,
    rank_argv,
)
from hvdtrain.launch.variables import FOUND_BY, passed_variables
from hvdtrain.runtime.environment import STOP_ON_USR1

COUNTS = """'{ slots[$1]++ } END { for (host in slots) { printf "%s%s:%d", comma, host, slots[host]; comma = "," } }'"""
"""A program of awk: from lines that name a host per slot to ``a:4,b:4``."""


def render_pbs(spec: JobSpec) -> Script:
    """Return the script of a job of PBS. It submits itself again by qsub(1B), ``-W depend``."""
    if "," in (spec.batch.array or ""):
        raise LaunchError("an array of PBS is one range", expected="--array 0-3", found=f"--array {spec.batch.array}")
    cores = (spec.cpus_per_rank or 1) * spec.ranks_per_node
    values = _start_values(spec, "PBS_NODEFILE", "PBS_ARRAY_INDEX")
    again = {"id": "PBS_JOBID", "submit": 'qsub -W "depend=afterany:$PBS_JOBID"'}
    return Script(fill("pbs.sh.j2", **values, **again, cores=cores, clock=clock), ("qsub",))


def render_lsf(spec: JobSpec) -> Script:
    """Return the script of a job of LSF. It submits itself again by bsub(1), ``-w``."""
    array, time_s = spec.batch.array, spec.batch.time_s
    if array and 0 in map(int, re.split("[-,%]", array)):
        raise LaunchError("LSF's arrays start at index 1", expected="--array 1-4", found=f"--array {array}")
    values = _start_values(spec, "LSB_DJOB_HOSTFILE", "LSB_JOBINDEX")
    if spec.batch.jsrun:
        values["line"] = join(insert_array_index(word, "LSB_JOBINDEX") for word in _by_jsrun(spec))
        values["variables"] = {**network_variables(spec), **_stop_variables(spec)}
    again = {"id": "LSB_JOBID", "submit": 'bsub -w "ended($LSB_JOBID)"'}
    return Script(fill("lsf.sh.j2", **values, **again, minutes=-(-time_s // 60) if time_s else None), ("bsub",))


def _by_jsrun(spec: JobSpec) -> tuple[str, ...]:
    """Return the command line of jsrun: one resource set per rank, with its GPU."""
    words = ["jsrun", "--nrs", str(spec.ranks), "--rs_per_host", str(spec.ranks_per_node), "--tasks_per_rs", "1"]
    words += ["--cpu_per_rs", str(spec.cpus_per_rank)] if spec.cpus_per_rank else []
    words += ["--gpu_per_rs", "1"] if spec.gpus_per_node else []
    return (*words, "--bind", "none", *spec.launcher_arguments, *rank_argv(spec))


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
        "line": join(insert_array_index(word, index) for word in words),
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


_TAKES = SCHEDULED | {"array", "notice", "interface", "requeues", "agents"}
PBS = Target("pbs", render_pbs, _TAKES | {"mem", "chunk"}, refuse=_refuse_start, even=True, shows_variables=True)
LSF = Target("lsf", render_lsf, _TAKES, refuse=_refuse_start, even=True, shows_variables=True)
