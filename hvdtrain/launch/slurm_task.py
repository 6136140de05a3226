"""``python -m hvdtrain.launch.slurm_task PROGRAM``: become PROGRAM as a rank of Horovod over Gloo, in a task of srun.

Horovod reads (``gloo_context.cc``) HOROVOD_RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE and the address
of the store. The numbers are from srun; the store is that of `srun_job`, through srun's environment.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException

from hvdtrain.errors import CANNOT_START, USAGE, LaunchError
from hvdtrain.launch.node_store import find_node_store, request, start_node_store
from hvdtrain.runtime.environment import environ, horovod_numbers, rank_info, tasks_per_node
from hvdtrain.runtime.interfaces import interface_of, interface_to

STORE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
INTERFACE = "HOROVOD_GLOO_IFACE"
STEP = "srun/step"
"""The key in the store under which the first task publishes the job step of the tasks."""

START_S = 600
"""How long ranks wait for each other, unless HOROVOD_GLOO_TIMEOUT_SECONDS is set: nodes load Python's packages from one
file system at different speeds.
"""


def task_numbers(environ: Mapping[str, str]) -> dict[str, int]:
    """Return Horovod's numbers of this task. A rank's cross_rank is the number of earlier nodes with its local_rank.

    Errors:
        LaunchError: srun did not start this process, or its variables are invalid.
    """
    of_slurm = {name: text for name, text in environ.items() if name.startswith("SLURM_")}
    info = rank_info(of_slurm)
    if info.launcher != "slurm":
        raise LaunchError(
            "srun did not start this process",
            expected="SLURM_STEP_NUM_TASKS and the other variables of a task",
            next_step="start it by: hvdtrain launch --to srun",
        )
    per_node, node = tasks_per_node(of_slurm["SLURM_STEP_TASKS_PER_NODE"]), int(of_slurm["SLURM_NODEID"])
    return {
        "rank": info.rank,
        "size": info.size,
        "local_rank": info.local_rank,
        "local_size": info.local_size,
        "cross_rank": sum(count > info.local_rank for count in per_node[:node]),
        "cross_size": sum(count > info.local_rank for count in per_node),
    }


def variables(environ: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables that the program's environment gets in addition. `host`: the name of this host.

    Errors:
        LaunchError: as of `task_numbers`; or there is no store.
    """
    numbers = task_numbers(environ)
    if STORE not in environ:
        raise LaunchError(
            "there is no rendezvous store for the ranks",
            expected=f"{STORE} in the environment that srun passes on",
            next_step="start it by: hvdtrain launch --to srun; or let srun pass the environment on: --export=ALL",
        )
    interface = environ.get(INTERFACE) or _interface(numbers, environ[STORE].partition(":")[0])
    return {
        **horovod_numbers(numbers),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": host,
        **({INTERFACE: interface} if interface else {}),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", str(START_S)),
    }


def _interface(numbers: Mapping[str, int], store: str) -> str:
    """Return the interface by which this node's ranks are reached: lo on one node, else that towards the store."""
    if numbers["local_size"] == numbers["size"]:
        return "lo"
    return interface_of(store) or interface_to(store)


def _meet(environ: Mapping[str, str], given: Mapping[str, str]) -> str:
    """Publish the step and return the address of this rank's store: that of its node, where there are several nodes.

    After an error it returns `srun_job`'s store, and Horovod reports the same error.
    """
    store, node = environ[STORE], environ["SLURM_NODEID"]
    try:
        if given["HOROVOD_RANK"] == "0" and (step := environ.get("SLURM_STEP_ID")):
            request(store, "PUT", STEP, step.encode())
        if given["HOROVOD_LOCAL_SIZE"] == given["HOROVOD_SIZE"]:
            return store
        if given["HOROVOD_LOCAL_RANK"] == "0":
            start_node_store(store, node)
        return find_node_store(store, node)
    except (OSError, HTTPException) as error:
        sys.stderr.write(f"hvdtrain.launch.slurm_task: srun_job does not answer: {error}\n")
        return store


def main(program: Sequence[str]) -> int:
    """Become the program. Returns 2 where this task cannot be a rank, 127 where there is no such program."""
    now = environ()
    try:
        given = variables(now, now.get("SLURMD_NODENAME") or platform.node())
    except LaunchError as error:
        sys.stderr.write(f"hvdtrain.launch.slurm_task: {error}\n")
        return USAGE
    given[STORE] = _meet(now, given)
    try:
        os.execvpe(program[0], list(program), {**now, **given})  # noqa: S606  (no shell, by intent)
    except OSError as error:
        sys.stderr.write(f"hvdtrain.launch.slurm_task: {program[0]} cannot be started: {error.strerror}\n")
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
