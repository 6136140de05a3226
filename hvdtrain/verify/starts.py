"""The starts of a run by its ledger, and which steps of each count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.state.ledger import StartHeader, ledger_files
from hvdtrain.verify.ledger_columns import Entries, read_file


@dataclass(frozen=True)
class Start:
    """A start of a run.

    Attributes:
        head: of the lowest rank whose file is there; all ranks should say the same.
        heads: of each rank whose file is there.
        entries: of each rank whose file is there.
    """

    head: StartHeader
    heads: Mapping[int, StartHeader]
    entries: Mapping[int, Entries]

    @property
    def missing(self) -> list[int]:
        """Ranks whose file is not there."""
        return [rank for rank in range(self.head.size) if rank not in self.entries]

    @property
    def tip(self) -> int:
        """The last step that any rank tells of."""
        return max([self.head.from_step, *(int(e.steps[-1]) for e in self.entries.values() if len(e.steps))])

    @property
    def complete(self) -> int:
        """The last step that all ranks tell of."""
        if self.missing:
            return self.head.from_step
        return min([int(e.steps[-1]) if len(e.steps) else self.head.from_step for e in self.entries.values()])


@dataclass(frozen=True)
class Window:
    """The steps of a start that count: after `first`, up to `last`.

    Attributes:
        start: whose they are.
        first: the step before the first of them.
        last: the last one that every rank has to tell of.
        is_newest: no later start took over.
    """

    start: Start
    first: int
    last: int
    is_newest: bool


def read_starts(folder: Path) -> tuple[list[Start], list[Path]]:
    """The starts of a ledger, in order; and files that their rank was killed in before anything was in them.

    Errors: those of `read_file`.
    """
    found: dict[int, dict[int, tuple[StartHeader, Entries]]] = {}
    empty: list[Path] = []
    for start, rank, path in ledger_files(folder):
        told = read_file(path)
        if told is None:
            empty.append(path)
        else:
            found.setdefault(start, {})[rank] = told
    starts = []
    for ranks in found.values():
        heads = {rank: head for rank, (head, _) in ranks.items()}
        starts.append(Start(heads[min(heads)], heads, {rank: entries for rank, (_, entries) in ranks.items()}))
    return starts, empty


def windows(starts: Sequence[Start], durable: int) -> list[Window]:
    """What counts, in order of steps: of step t the newest start that began before it.

    Args:
        starts: in order.
        durable: the step of the newest checkpoint, which every rank has to have told of; 0 where there is none.
    """
    found: list[Window] = []
    upper: int | None = None
    for start in reversed(starts):
        first = start.head.from_step
        last = max(start.complete, durable) if upper is None else upper
        if upper is None or first < upper:
            found.append(Window(start, first, last, upper is None))
            upper = first
    return found[::-1]


def disagreement(start: Start) -> str | None:
    """What the ranks of a start say differently of it; None where they agree."""
    for rank, head in start.heads.items():
        if replace(head, rank=0, host="") != replace(start.head, rank=0, host=""):
            return f"the ranks of start {head.start} are not of one mind about what it is: rank {rank} says {head}"
    return None
