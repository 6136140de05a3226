"""What a rank trains on: its micro-batches, in order, told to the ledger as they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.config.schema import Config
from hvdtrain.data.loader import HostBatch, Stream, seed_forward, train_batches
from hvdtrain.data.order import MicroBatch
from hvdtrain.spans import Spans
from hvdtrain.state.ledger import Ledger
from hvdtrain.state.train_state import Progress
from hvdtrain.training.start.ledger_start import begin_start


@dataclass
class Feed:
    """The samples of one rank, from any position on.

    Attributes:
        config: seed and loader.
        comm: the ranks.
        stream: this rank's share.
        ledger: told which samples this rank takes.
        spans: of the training thread.
        collate: makes a batch of samples; None for torch's own.
        on_cuda: whether batches go to a CUDA device.
    """

    config: Config
    comm: Comm
    stream: Stream
    ledger: Ledger
    spans: Spans
    collate: Callable[[list[Any]], Any] | None
    on_cuda: bool
    _batches: Iterator[HostBatch] = field(default_factory=lambda: iter(()), init=False)

    def begin(self, progress: Progress, stop: int, why: str) -> None:
        """Go on from `progress` to step `stop`: a start of the ledger. `why`: see `begin_start`. Collective: yes."""
        self.stream = replace(self.stream, left_out=progress.left_out)
        begin_start(self.ledger, self.comm, self.stream, progress, why)
        loader, steps = self.config.loader, stop - progress.step
        self._batches = train_batches(self.stream, progress.position, steps, loader, self.collate, on_cuda=self.on_cuda)

    def micro_batches(self, position: int) -> list[MicroBatch]:
        """Those of this rank in the step that begins at `position`."""
        return self.stream.step(position)

    def draw(self, mine: list[MicroBatch], step: int) -> Iterator[tuple[Callable[[], None], Any]]:
        """Each with what seeds its forward pass; `step`: the one that they are of, counted from 1."""
        for where in mine:
            with self.spans("data"):
                drawn = next(self._batches)
            self.ledger.add_samples(where.start, where.stop, drawn.indices)
            yield partial(seed_forward, self.config.seed, where.start), drawn.batch
        self.ledger.write(step)  # before the ranks agree on the step
