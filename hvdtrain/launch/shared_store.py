"""What the ranks of one srun tell each other while Horovod starts, kept by the process that called srun."""

from __future__ import annotations

import threading

from hvdtrain.launch.store import ABSENT, FOUND, GONE, MOST_KEYS

ROUND = 1
"""The only one: ranks that srun started come once."""

_POLL_S = 4.0
"""A request for a key that is not there yet is answered after this time; Horovod asks again."""


class SharedStore:
    """The keys, for a `Rendezvous`, whose threads call it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._came = threading.Condition()

    def put(self, number: int, key: str, value: bytes) -> None:
        """Keep a value."""
        with self._came:
            if number == ROUND and len(self._values) < MOST_KEYS:
                self._values[key] = value
                self._came.notify_all()

    def get(self, number: int, key: str) -> tuple[int, bytes]:
        """A status of HTTP and the value, which is waited for a moment."""
        if number != ROUND:
            return GONE, b""
        with self._came:
            self._came.wait_for(lambda: key in self._values, _POLL_S)
            return (FOUND, self._values[key]) if key in self._values else (ABSENT, b"")
