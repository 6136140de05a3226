"""One order for the collectives of all ranks, and their errors if another rank is lost.

torch matches collectives by their order, ours are matched by name: `Order` makes one order of both.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Event, Thread

import torch.distributed as dist
from torch import Tensor

from hvdtrain.comm.base import kept_for_stream
from hvdtrain.errors import LostRankError

_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|NCCL (error|communicator)|Broken pipe"
)


def lost_rank(error: BaseException, what: str) -> LostRankError:
    """Return the error to raise instead of torch's. `what`: what this rank waited for."""
    return LostRankError(
        f"another rank was lost during {what}",
        found=str(error).strip().partition("\n")[0],
        next_step="look for the first error in the output of the other ranks",
    )


@contextmanager
def naming_lost_rank(what: str) -> Iterator[None]:
    """Raise the error of a lost rank instead of torch's. `what`: what this rank waits for within."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or _CONNECTION.search(str(error)):
            raise lost_rank(error, what) from error
        raise


_BLOCK = 1024  # entries of the order that are deleted together, once every rank has read them

Started = tuple["dist.Work | None", Callable[[], Tensor]]
"""A running collective, None if it is complete, and what returns its result then."""


class Order:
    """One order of the collectives on all ranks, kept in a store.

    A rank announces the name of a collective. The last one to announce it appends the name to a log. A thread of each
    rank starts the collectives in the order of the log: every name there has been announced by all, so no rank waits
    for one that it has not begun. A thread, because other ranks may need it while this one waits for anything else.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store, self._size = store, size
        # A waiting client blocks all users of the same object. torch's annotations lack the method.
        self._reader = store.clone()  # type: ignore[attr-defined]
        self._announced: dict[str, TorchHandle] = {}
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one for each entry of the log that this rank announced
        self._next = 0
        Thread(target=self._run, name="torch-order", daemon=True).start()

    def announce(self, name: str, handle: TorchHandle) -> None:
        """Have `handle` started when its turn comes."""
        assert name not in self._announced, f"two collectives run at once under the name {name}"
        self._announced[name] = handle
        if self._store.add(f"ready/{name}", 1) == self._size:
            self._store.delete_key(f"ready/{name}")  # before others can announce it again
            self._store.set(f"log/{self._store.add('length', 1) - 1}", name)
        self._tokens.put(None)

    def _run(self) -> None:
        while True:
            self._tokens.get()
            try:
                handle = self._announced.pop(self._read())
            except RuntimeError as error:  # the store is lost, and all collectives with it
                for waiting in list(self._announced.values()):
                    waiting.fail(error)
                return
            handle.start()

    def _read(self) -> str:
        """Return the next name of the log, once it is there."""
        name: str = self._reader.get(f"log/{self._next}").decode()
        self._next += 1
        if self._next % _BLOCK == 0 and self._reader.add(f"read/{self._next}", 1) == self._size:
            for key in [f"read/{self._next}", *(f"log/{n}" for n in range(self._next - _BLOCK, self._next))]:
                self._reader.delete_key(key)
        return name


class TorchHandle:
    """A collective of torch, from its announcement to its result."""

    def __init__(self, name: str, in_flight: dict[str, float], begin: Callable[[], Started]) -> None:
        self._name, self._in_flight, self._begin = name, in_flight, begin
        self._started = Event()
        self._work: dist.Work | None = None
        self._finish: Callable[[], Tensor] | None = None
        self._error: RuntimeError | None = None
        self._result: Tensor | None = None
        in_flight[name] = time.monotonic()

    def start(self) -> None:
        """Start the collective; it is its turn on every rank."""
        try:
            self._work, self._finish = self._begin()
        except RuntimeError as error:
            self._error = error
        self._started.set()

    def fail(self, error: RuntimeError) -> None:
        """End the collective without starting it."""
        self._error = error
        self._started.set()

    def done(self) -> bool:
        """Check whether `wait` would return at once."""
        if self._result is not None or not self._started.is_set():
            return self._result is not None
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Block until the collective is complete and return its result. Errors: LostRankError."""
        if self._result is None:
            self._started.wait()
            with naming_lost_rank(f"the collective {self._name}"):  # it stays listed as in flight then
                if self._error is not None:
                    raise self._error
                if self._work is not None:
                    self._work.wait()
            assert self._finish is not None
            self._result = self._finish()
            self._in_flight.pop(self._name, None)
        return kept_for_stream(self._result)
