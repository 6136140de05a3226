"""The energy of all ranks in the journal: what a run that is killed has used is known to a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.observe.energy import KINDS, Counter, EnergyMeter

EVERY_S = 10.0


class EnergyUse:
    """Sums the millijoules of all ranks with the integers of each step. A watcher of the recorder.

    The event `energy` has the joules by kind since the start of this round. Rank 0 writes it every ten seconds and at
    the end. A counter that fails makes its kind unknown for this round: `failed` names it.

    Args:
        counters: that this rank reads, by kind.
        kinds: that some rank reads.
        event: records an event; used on rank 0.
    """

    def __init__(
        self,
        comm: Comm,
        counters: Mapping[str, Counter],
        kinds: Sequence[str],
        event: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm, self._event, self._clock = comm, event, clock
        self._kinds = [kind for kind in KINDS if kind in kinds]
        self._meter = EnergyMeter(counters)
        self._sent_mj = dict.fromkeys(KINDS, 0)
        self._sum_mj = dict.fromkeys(self._kinds, 0)
        self._failed: set[str] = set()
        self._written_s, self._step = clock(), 0

    def values(self) -> list[int]:
        """Return the millijoules since the last call and whether the counter failed, for each kind."""
        used = self._meter.used_mj()
        found = []
        for kind in self._kinds:
            found += [used.get(kind, 0) - self._sent_mj[kind], int(kind in self._meter.failed)]
        self._sent_mj |= used
        return found

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Add the sums over ranks; on rank 0, write them every ten seconds."""
        self._step = step
        self._add(sums)
        if self._clock() - self._written_s >= EVERY_S:
            self._write()

    def finish(self) -> None:
        """Read all counters once more, and write the sums of the round. Collective: yes."""
        if not self._kinds:
            return
        self._meter.read()
        summed = self._comm.allreduce(torch.tensor(self.values(), dtype=torch.int64), name="energy").wait()
        self._add(summed.tolist())
        self._write()

    def begin_step(self, step: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Stop reading the counters."""
        self._meter.close()

    def _add(self, sums: Sequence[int]) -> None:
        for kind, used_mj, failed in zip(self._kinds, sums[::2], sums[1::2], strict=True):
            self._sum_mj[kind] += used_mj
            self._failed |= {kind} if failed else set()

    def _write(self) -> None:
        self._written_s = self._clock()
        if self._comm.rank == 0 and self._kinds:
            joules = {kind: value / 1000 for kind, value in self._sum_mj.items() if kind not in self._failed}
            facts = {"failed": sorted(self._failed)} if self._failed else {}
            self._event({"event": "energy", "at_step": self._step, "joules": joules, **facts})
