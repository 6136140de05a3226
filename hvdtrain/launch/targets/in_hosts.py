"""Start ranks inside an allocation of PBS or LSF: by MPI with a file of hosts, or without MPI by hvdtrain's driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.errors import LaunchError
from hvdtrain.launch.spec import JobSpec, Shell, join
from hvdtrain.launch.targets import hydra, openmpi
from hvdtrain.launch.variables import FOUND_BY, passed_variables
from hvdtrain.runtime.environment import STOP_ON_USR1

COUNTS = """'{ slots[$1]++ } END { for (host in slots) { printf "%s%s:%d", comma, host, slots[host]; comma = "," } }'"""
"""A program of awk: from lines that name a host per slot to ``a:4,b:4``."""


def start_values(spec: JobSpec, file: str, index: str) -> Mapping[str, Any]:
    """Return the values for the templates.

    `file`: the shell variable that names the file with a line per slot; `index`: that with the index in an array.
    Errors: LaunchError.
    """
    stops = stop_variables(spec)
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
    elif spec.mpi.flavour == "openmpi":
        words, variables = openmpi.argv(spec, ("--hostfile", named)), openmpi.variables(spec)
    else:
        words, variables = hydra.argv(spec, ("-machinefile", named)), hydra.variables(spec)
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


def refuse_start(spec: JobSpec, to: str) -> None:
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


def stop_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables by which SIGUSR1 makes ranks of MPI save and stop, in a job that submits itself again.

    mpirun forwards SIGUSR1, but kills the ranks soon after a SIGTERM. Our own driver stops them at SIGTERM.

    Errors: LaunchError if the job cannot submit itself again.
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


def insert_array_index(word: str, index: str) -> str:
    """Replace ``{array}`` in a word with the job's index in its array."""
    if isinstance(word, Shell) or "{array}" not in word:
        return word
    return Shell(f'"${{{index}}}"'.join(join([part]) if part else "" for part in word.split("{array}")))
