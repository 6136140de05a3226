"""Workers that train apart between outer steps, and the ranks that serve them: pure functions of their numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.sync import apportion
from hvdtrain.data.order import rank_share


@dataclass(frozen=True)
class Workers:
    """`count` workers, which `ranks` ranks serve.

    With fewer ranks than workers, a rank serves consecutive workers, one after the other. With more ranks than workers,
    consecutive ranks serve a worker together. `parts` are the workers' shares of each step's micro-batches; without
    them, shares are equal.
    """

    count: int
    ranks: int
    parts: tuple[int, ...] = ()

    def served_by(self, rank: int) -> range:
        """Return the workers that a rank serves."""
        if self.ranks <= self.count:
            return rank_share(self.count, rank, self.ranks)
        worker = _holder(rank, self.ranks, self.count)
        return range(worker, worker + 1)

    @property
    def most_served(self) -> int:
        """Number of workers that the rank serves which serves the most."""
        return max(len(self.served_by(rank)) for rank in range(self.ranks))

    def ranks_of(self, worker: int) -> range:
        """Return the ranks that serve a worker; the first is its leader."""
        if self.ranks > self.count:
            return rank_share(self.ranks, worker, self.count)
        rank = _holder(worker, self.count, self.ranks)
        return range(rank, rank + 1)

    def leaders(self) -> list[int]:
        """Return the ranks that exchange the changes of workers."""
        return sorted({self.ranks_of(worker)[0] for worker in range(self.count)})

    def groups(self) -> list[list[int]]:
        """Return the ranks of each communicator besides that of all: of the workers, then that of the leaders."""
        if self.ranks <= self.count:
            return []
        served = [list(self.ranks_of(worker)) for worker in range(self.count)]
        return [ranks for ranks in [*served, self.leaders()] if len(ranks) > 1]

    def shares(self, micro_batches: int, rank: int) -> list[range]:
        """Return which of a step's micro-batches a rank runs, for each worker that it serves."""
        found, counts = [], apportion(micro_batches, self.parts or (1,) * self.count)
        for worker in self.served_by(rank):
            start, ranks = sum(counts[:worker]), self.ranks_of(worker)
            part = rank_share(counts[worker], rank - ranks.start, len(ranks))
            found.append(range(start + part.start, start + part.stop))
        return found


def _holder(index: int, count: int, size: int) -> int:
    """Return the rank that has `index` in its `rank_share`."""
    each, more = divmod(count, size)
    larger = more * (each + 1)
    return index // (each + 1) if index < larger else more + (index - larger) // each
