"""The store of one node of an srun: a copy of `srun_job`'s, so that each value crosses the network once per node.

The first task of a node forks this process before it becomes the program, and publishes its address for the other
tasks. Values of all ranks travel under the keys `BATCH` + 0, 1, ..., many values in each.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from itertools import count
from typing import Any

from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.rendezvous_store import FOUND, Relay, packed, unpacked

ROUND = 1
"""The only round: ranks of srun join once."""

BATCH = "srun/batch-"
NODE = "srun/node-"
LOG = "srun/log"

_TIMEOUT_S = 30
_TRIES, _AGAIN_S = 3, 0.5
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals to the tasks. The ranks save; the store must outlive its rank."""


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

    Errors:
        OSError, HTTPException: no connection.
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
        self._rendezvous = Rendezvous(self._log, put=lambda number, key, value: self._outbox.put((key, value)))

    def run(self, wanted: Callable[[], bool]) -> None:
        """Copy new values while `wanted`.

        Errors:
            OSError, HTTPException: the store has ended.
        """
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

    def _log(self, text: str) -> None:
        self._outbox.put((LOG, f"node {self._node}: {text}".encode()))

    def _hand_on(self) -> None:
        while True:
            request(self._store, "PUT", *self._outbox.get())


def find_node_store(store: str, node: str) -> str:
    """Return the address of this node's store after a short wait; `store` itself where there is none.

    Errors:
        OSError, HTTPException: no connection to `store`.
    """
    for _ in range(5):  # each waits for the key
        found = request(store, "GET", f"{NODE}{node}")
        if found is not None:
            return found.decode()
    return store
