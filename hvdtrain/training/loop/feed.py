"""The micro-batches that a rank trains on, in order; the ledger records them as they are drawn."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.data.loader import HostBatch, StepShare, Stream, seed_forward, train_batches
from hvdtrain.data.order import MicroBatch
from hvdtrain.state.ledger import Ledger, StartHeader, next_start
from hvdtrain.state.train_state import Progress
from hvdtrain.training.round import Round


@dataclass
class Feed:
    """The samples of one rank, from any position; `stream` is its share of them.

    `records`: whether the ledger notes them here, not on another rank with the same samples. `shares`: yields this
    rank's share of each further step, for `draw`; not of workers that train apart.
    """

    current: Round
    stream: Stream
    ledger: Ledger
    records: bool = True
    shares: Iterator[StepShare] = field(default_factory=lambda: iter(()), init=False)
    _batches: Iterator[HostBatch] = field(default_factory=lambda: iter(()), init=False)
    _ahead: Future[HostBatch] | None = field(default=None, init=False)

    def begin(self, progress: Progress, stop: int, why: str) -> None:
        """Draw from `progress` to step `stop`: a new start in the ledger. `why`: see `begin_start`. Collective: yes."""
        self.stream = replace(self.stream, left_out=progress.left_out, data_state=progress.data_state)
        begin_start(self.ledger, self.current.comm, self.stream, progress, why)
        worker, loader, steps = self.current.worker, self.current.run.config.loader, stop - progress.step
        collate, on_cuda = worker.task.collate, worker.device.type == "cuda"
        self._ahead = None
        self.shares = self.stream.steps(progress.position, steps)
        self._batches = train_batches(self.stream, progress.position, steps, loader, collate, on_cuda=on_cuda)

    def ahead(self) -> None:
        """Draw the first batch of the next step now. If that fails, `draw` raises the error."""
        self._ahead = Future()
        try:
            with self.current.spans("data"):
                self._ahead.set_result(next(self._batches))
        except Exception as error:  # StopIteration, too: nobody draws after the last step
            self._ahead.set_exception(error)

    def draw(
        self, mine: list[MicroBatch], step: int, repeated: Sequence[MicroBatch] = ()
    ) -> Iterator[tuple[Callable[[], None], Any]]:
        """Yield each batch with a function that seeds its forward pass. `step` is counted from 1.

        Those of `repeated` come last; another rank records their samples.
        """
        for number, where in enumerate([*mine, *repeated]):
            if self._ahead is not None:
                drawn, self._ahead = self._ahead.result(), None
            else:
                with self.current.spans("data"):
                    drawn = next(self._batches)
            if not number and drawn.data_state:
                self.current.worker.state.progress.data_state = orjson.loads(drawn.data_state)
            if number < len(mine) and self.records:
                self.ledger.add_samples(where.start, where.stop, drawn.indices)
            yield partial(seed_forward, self.stream.seed, where.start), drawn.batch
        self.ledger.write(step)  # before the ranks agree on the step


def begin_start(ledger: Ledger, comm: Comm, stream: Stream, progress: Progress, why: str) -> None:
    """Begin a file of `ledger` for the steps after `progress`, which is equal on all ranks. Collective: yes.

    `why` is started, round (of an elastic job), rolled_back, or balanced (other shares of the global batch).
    """
    # Hosts without a shared disk may know other starts; rank 0's host may have missed some.
    start = max(allgather_json(comm, next_start(ledger.folder) if comm.local_rank == 0 else 0, name="ledger/start"))
    head = StartHeader(
        start=start,
        why=why,
        from_step=progress.step,
        position=progress.position,
        size=comm.size,
        rank=comm.rank,
        host=socket.gethostname(),
        seed=stream.seed,
        global_batch=stream.global_batch,
        micro_batch=stream.micro_batch,
        samples=progress.samples,
        data_id=progress.data_id,
        left_out=progress.left_out,
        sources=[list(source) for source in stream.order().sources],
    )
    ledger.begin_start(head)
