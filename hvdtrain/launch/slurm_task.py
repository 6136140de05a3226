"""``python -m hvdtrain.launch.slurm_task PROGRAM``: become PROGRAM as a rank of Horovod over Gloo, in a task of srun.

Horovod reads (``gloo_context.cc``) HOROVOD_RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, CROSS_RANK, CROSS_SIZE and the address
of the store. The numbers are from srun; the store is that of `srun_job`, through srun's environment. Of several nodes
each has a copy of it, so that each value crosses the network once per node. The first task of a node forks the process
of the copy before it becomes the program, and publishes its address for the other tasks. Values of all ranks travel
under the keys `BATCH` + 0, 1, ..., many values in each.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from itertools import count
from typing import Any

from hvdtrain.errors import CANNOT_START, USAGE, LaunchError
from hvdtrain.launch.agent_link import Relay, packed, unpacked
from hvdtrain.launch.rendezvous import FOUND, Rendezvous
from hvdtrain.runtime.environment import environ, horovod_numbers, rank_info, tasks_per_node
from hvdtrain.runtime.interfaces import interface_of, interface_to

ROUND = 1
"""The only round: ranks of srun join once."""

BATCH = "srun/batch-"
NODE = "srun/node-"
LOG = "srun/log"

_TIMEOUT_S = 30
_TRIES, _AGAIN_S = 3, 0.5
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to the tasks. The ranks save; the store must outlive its rank."""

STORE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
INTERFACE = "HOROVOD_GLOO_IFACE"
STEP = "srun/step"
"""The key in the store under which the first task publishes the job step of the tasks."""

START_S = 600
"""How long ranks wait for each other, unless HOROVOD_GLOO_TIMEOUT_SECONDS is set: nodes load Python's packages from one
file system at different speeds.
"""


class Batches:
    """Collects the values in `srun_job`'s store into batches for its copies, in a thread."""

    def __init__(self, add: Callable[[int, dict[str, bytes]], None]) -> None:
        self._add = add
        self._numbers = count()
        self._inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._relay = Relay(self._send)
        self._relay.open(ROUND, {})

    def put(self, key: str, value: bytes) -> None:
        """Queue a value for the next batch."""
        self._inbox.put((key, value))

    def run(self) -> None:
        """Send batches, for ever."""
        while True:
            self._put(*self._inbox.get())
            while not self._inbox.empty():
                self._put(*self._inbox.get())
            self._relay.flush()

    def _put(self, key: str, value: bytes) -> None:
        self._relay.put(ROUND, key, packed(value))

    def _send(self, kind: str, *, round: int, keys: dict[str, Any]) -> None:
        if kind == "keys":
            self._add(round, {f"{BATCH}{next(self._numbers)}": json.dumps(keys).encode()})


def request(store: str, method: str, key: str, body: bytes | None = None) -> bytes | None:
    """Send a request to a store at an address as Horovod gets it; None where it does not have the key yet.

    Errors: OSError, HTTPException without a connection.
    """
    address, _, path = store.partition("/")
    for left in reversed(range(_TRIES)):
        with closing(HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
            try:
                connection.request(method, f"/{path}:0/{key}", body)
                answer = connection.getresponse()
                return answer.read() if answer.status == FOUND else None
            except (OSError, HTTPException):  # perhaps closed to make room for another connection
                if not left:
                    raise
        time.sleep(_AGAIN_S)
    return None


def start_node_store(store: str, node: str) -> None:
    """Start the store of this node in a process that lives as long as this one."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):  # srun waits until all its pipes are closed
            os.dup2(nothing, file)
        NodeStore(store, node).run(lambda: os.getppid() == parent)
    finally:
        os._exit(0)


class NodeStore:
    """A copy of `srun_job`'s store. `store`: the address of that, as Horovod gets it; `node`: number of this node."""

    def __init__(self, store: str, node: str) -> None:
        self._store, self._node = store, node
        self._outbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._rendezvous = Rendezvous(
            lambda text: self._outbox.put((LOG, f"node {node}: {text}".encode())),
            put=lambda number, key, value: self._outbox.put((key, value)),
        )

    def run(self, wanted: Callable[[], bool]) -> None:
        """Copy new values while `wanted`. Errors: OSError, HTTPException if the store has ended."""
        self._rendezvous.start()
        self._rendezvous.open(ROUND, {})
        threading.Thread(target=self._hand_on, daemon=True).start()
        request(self._store, "PUT", f"{NODE}{self._node}", f"{self._rendezvous.address}/{ROUND}".encode())
        number = 0
        while wanted():
            batch = request(self._store, "GET", f"{BATCH}{number}")
            if batch is not None:
                number += 1
                self._rendezvous.add(ROUND, {key: unpacked(value) for key, value in json.loads(batch).items()})
        self._rendezvous.close()

    def _hand_on(self) -> None:
        while True:
            request(self._store, "PUT", *self._outbox.get())


def find_node_store(store: str, node: str) -> str:
    """Return the address of this node's store after a short wait; `store` itself where there is none.

    Errors: OSError, HTTPException without a connection to `store`.
    """
    for _ in range(5):  # each waits for the key
        found = request(store, "GET", f"{NODE}{node}")
        if found is not None:
            return found.decode()
    return store


def task_numbers(environ: Mapping[str, str]) -> dict[str, int]:
    """Return Horovod's numbers of this task. A rank's cross_rank is the number of earlier nodes with its local_rank.

    Errors: LaunchError if srun did not start this process, or its variables are invalid.
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

    Errors: LaunchError as of `task_numbers`; or there is no store.
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
