"""Tensors by name: Horovod writes a tensor's name once, in metadata before its first event, with nothing escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

HEAD = b'{"name": "process_name"'
"""What the metadata of a tensor begins with."""

LONGEST = 1 << 16
"""Bytes of a name that are looked at."""

MOST = 1 << 24
"""A file has fewer tensors than this."""

_OPENING = re.compile(rb'\{"name": "process_name", "ph": "M", "pid": (\d{1,8}), "args": \{"name": "')
_CLOSING = b'"}},\n{"name": "process_sort_index", "ph": "M", "pid": %s, "args": {"sort_index": %s}},'
"""What follows a name, with its tensor's number; it cannot stand in a name by chance, so that anything else may."""


def find_named(text: bytes) -> Iterator[tuple[int, int, int, str]]:
    """Of each name as Horovod writes it: where its metadata begins and ends, the tensor's number, the name."""
    at = text.find(HEAD)
    while at >= 0:
        end = at + 1
        if found := _match(text, at):
            pid, name, end = found
            yield at, end, pid, name.decode("utf-8", "replace")
        at = text.find(HEAD, end)


def is_whole(text: bytes, at: int, end: int) -> bool:
    """Whether the metadata that begins at `at` is over before `end`."""
    found = _match(text, at)
    return found is not None and found[2] <= end


def _match(text: bytes, at: int) -> tuple[int, bytes, int] | None:
    opening = _OPENING.match(text, at)
    if opening is None:
        return None
    begin = opening.end()
    closing = _CLOSING % (opening[1], opening[1])
    end = text.find(closing, begin, begin + LONGEST + len(closing))
    return None if end < 0 else (int(opening[1]), text[begin:end], end + len(closing))


class Tensors:
    """Their numbers in the order in which they appear, by what the file calls them by.

    Attributes:
        names: by number.
        unnamed: how many of them have a name of ours, because the file has none.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.unnamed = 0
        self._of_pid = np.full(256, -1, np.int64)

    def name(self, pid: int, name: str) -> None:
        """`pid` has this name from now on."""
        self._grow(pid)
        known = int(self._of_pid[pid])
        if known < 0 or self.names[known] != name:
            self._of_pid[pid] = len(self.names)
            self.names.append(name)

    def clear(self) -> None:
        """Another Timeline begins, with numbers of its own."""
        self._of_pid[:] = -1

    def find(self, pid: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of tensors; what has no name gets one. `pid` is less than `MOST`."""
        if len(pid):
            self._grow(int(pid.max()))
        for missing in np.unique(pid[self._of_pid[pid] < 0]).tolist():
            self.unnamed += 1
            self.name(missing, f"tensor {missing}")
        return self._of_pid[pid]

    def _grow(self, pid: int) -> None:
        if pid >= len(self._of_pid):
            more = max(2 * len(self._of_pid), pid + 1) - len(self._of_pid)
            self._of_pid = np.append(self._of_pid, np.full(more, -1, np.int64))
