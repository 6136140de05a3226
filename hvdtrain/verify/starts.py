"""The starts in a ledger, and the steps of each that count."""

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
        header: header of the lowest rank with a file; those of all ranks should agree.
        headers: header of each rank with a file.
        entries: entries of each rank with a file.
    """

    header: StartHeader
    headers: Mapping[int, StartHeader]
    entries: Mapping[int, Entries]

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        return [rank for rank in range(self.header.size) if rank not in self.entries]

    @property
    def tip(self) -> int:
        """The last step that any rank has recorded."""
        return max([self.header.from_step, *(int(e.steps[-1]) for e in self.entries.values() if len(e.steps))])

    @property
    def complete(self) -> int:
        """The last step that all ranks have recorded."""
        if self.missing:
            return self.header.from_step
        return min([int(e.steps[-1]) if len(e.steps) else self.header.from_step for e in self.entries.values()])


@dataclass(frozen=True)
class Window:
    """The steps of a start that count: after `first`, up to `last`.

    Attributes:
        start: the start.
        first: the step before the first one.
        last: the last step that every rank must have recorded.
    """

    start: Start
    first: int
    last: int


def read_starts(folder: Path) -> tuple[list[Start], list[Path]]:
    """Return the starts in a ledger, in order, and the files without a header, from ranks that were killed early.

    Errors: those of `read_file`.
    """
    found: dict[int, dict[int, tuple[StartHeader, Entries]]] = {}
    empty: list[Path] = []
    for start, rank, path in ledger_files(folder):
        content = read_file(path)
        if content is None:
            empty.append(path)
        else:
            found.setdefault(start, {})[rank] = content
    starts = []
    for ranks in found.values():
        headers = {rank: header for rank, (header, _) in ranks.items()}
        starts.append(Start(headers[min(headers)], headers, {rank: entries for rank, (_, entries) in ranks.items()}))
    return starts, empty


def find_windows(starts: Sequence[Start], durable: int) -> list[Window]:
    """Return the steps that count, in order. For step t this is the newest start that began before t.

    Args:
        starts: starts in order.
        durable: step of the newest checkpoint, which every rank must have recorded; 0 if there is none.
    """
    found: list[Window] = []
    upper: int | None = None
    for start in reversed(starts):
        first = start.header.from_step
        last = max(start.complete, durable) if upper is None else upper
        if upper is None or first < upper:
            found.append(Window(start, first, last))
            upper = first
    return found[::-1]


def find_disagreement(start: Start) -> str | None:
    """Return an error if the ranks have recorded different headers of a start."""
    for rank, header in start.headers.items():
        if replace(header, rank=0, host="") != replace(start.header, rank=0, host=""):
            return f"the ranks have recorded different headers of start {header.start}: rank {rank} has {header}"
    return None
