"""The store of one node of an srun: a copy of that of `srun_job`, so that each value crosses the network once a node.

The first task of a node forks it before it becomes the program. It puts there where it is, for the tasks beside it.
What the ranks of any node put is handed on under the keys `BATCH` + 0, 1, ..., many values in each.
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
"""The only one: ranks that srun started come once."""

BATCH = "srun/batch-"
NODE = "srun/node-"
LOG = "srun/log"

_TIMEOUT_S = 30
_TRIES, _AGAIN_S = 3, 0.5
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of the tasks: the ranks save, and the store stays as long as the rank that it belongs to."""


class Batches:
    """What is put into the store of `srun_job`, for the copies of it; in a thread, as many put at once."""

    def __init__(self, add: Callable[[int, dict[str, bytes]], None]) -> None:
        self._add = add
        self._numbers = count()
        self._inbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._relay = Relay(self._send)
        self._relay.open(ROUND, {})

    def put(self, key: str, value: bytes) -> None:
        """Hand a value on, soon."""
        self._inbox.put((key, value))

    def run(self) -> None:
        """Hand on what comes."""
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
    """A request to a store, as Horovod is given it; None where it has no such key as yet.

    Errors:
        OSError, HTTPException: it is not reached.
    """
    address, _, path = store.partition("/")
    for left in reversed(range(_TRIES)):
        with closing(HTTPConnection(address, timeout=_TIMEOUT_S)) as connection:
            try:
                connection.request(method, f"/{path}:0/{key}", body)
                answer = connection.getresponse()
                return answer.read() if answer.status == FOUND else None
            except (OSError, HTTPException):  # closed for a stranger's, perhaps
                if not left:
                    raise
        time.sleep(_AGAIN_S)
    return None


def start_node_store(store: str, node: str) -> None:
    """Start the store of this node, in a process that lives as long as this one and what this one becomes."""
    parent = os.getpid()
    if os.fork():
        return
    try:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):  # srun waits for the end of what may be written to it
            os.dup2(nothing, file)
        NodeStore(store, node).run(lambda: os.getppid() == parent)
    finally:
        os._exit(0)


class NodeStore:
    """A copy of a store.

    Args:
        store: that of `srun_job`, as Horovod would be given it.
        node: the number of this node.
    """

    def __init__(self, store: str, node: str) -> None:
        self._store, self._node = store, node
        self._outbox: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._rendezvous = Rendezvous(self._log, put=lambda number, key, value: self._outbox.put((key, value)))

    def run(self, wanted: Callable[[], bool]) -> None:
        """Copy what comes, as long as it is wanted.

        Errors:
            OSError, HTTPException: the store is not reached, as it has ended.
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
    """The store of this node, waited for a moment; `store` itself where there is none.

    Errors:
        OSError, HTTPException: `store` is not reached.
    """
    for _ in range(5):  # each waits for the key
        found = request(store, "GET", f"{NODE}{node}")
        if found is not None:
            return found.decode()
    return store
