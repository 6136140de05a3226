"""Events as Horovod's own writer writes them, read by array operations, a chunk of bytes at a time.

The writer (horovod/common/timeline.cc) knows five forms, and always these blanks::

    {"ph": "B", "name": "QUEUE", "ts": 12, "pid": 3}
    {"ph": "X", "name": "0", "ts": 12, "pid": 3, "dur": 0}
    {"ph": "E", "ts": 12, "pid": 3}
    {"ph": "E", "ts": 12, "pid": 3, "args": {"dtype": "float32", "shape": "[2, 3]"}}
    {"ph": "i", "name": "CYCLE_START", "ts": 12, "s": "g"}

What keeps to them to the byte is taken here; the rest is for `salvage`, which is slow and takes any JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.timeline.reading.tensor_sizes import UNREADABLE, Sizes
from hvdtrain.timeline.reading.words import Places, Words

START = b'{"ph": "'
"""What each of these begins with."""

_LONGEST_NAME = 32
_NO_COMMA = 8
"""Commas that stand for none, behind the text."""


@dataclass(frozen=True)
class Events:
    """Events in the order of the file.

    Attributes:
        offset, end: of the first byte, and after the last one [n].
        kind: B, E, X or i, as a byte [n].
        ts: microseconds [n].
        pid: -1 where there is none [n].
        name: of B its number among `Names`, of X the rank; else 0 [n].
        nbytes: of E what its arguments say, else -1 [n].
    """

    offset: Places
    end: Places
    kind: NDArray[np.uint8]
    ts: NDArray[np.float64]
    pid: NDArray[np.int64]
    name: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def take(self, which: NDArray[Any]) -> Events:
        """Some of them, or all in another order."""
        return Events(*(getattr(self, field.name)[which] for field in fields(self)))


class Names:
    """Names of operations by number, found again by a hash of all their bytes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._hashes = np.empty(0, np.uint64)
        self._of_hash = np.empty(0, np.int64)

    def number(self, name: str) -> int:
        """Of a name, new or not."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def find(self, words: Words, start: Places, end: Places) -> NDArray[np.int64]:
        """Numbers of the names that stand there; -1 for what the writer cannot have written."""
        hashes = words.hashes(start, end - start)
        new, first = np.unique(hashes[~np.isin(hashes, self._hashes)], return_index=True)
        if len(new):
            where = np.flatnonzero(~np.isin(hashes, self._hashes))[first]
            self._learn(new, [words.cut(int(start[i]), int(end[i])) for i in where])
        found = self._of_hash[np.searchsorted(self._hashes, hashes)] if len(hashes) else hashes.astype(np.int64)
        return np.where(end - start <= _LONGEST_NAME, found, -1)

    def _learn(self, hashes: NDArray[np.uint64], names: list[bytes]) -> None:
        numbers = [self.number(name.decode()) if _is_plain(name) else -1 for name in names]
        every = np.concatenate([self._hashes, hashes])
        order = np.argsort(every)
        self._hashes = every[order]
        self._of_hash = np.concatenate([self._of_hash, np.array(numbers, np.int64)])[order]


def _is_plain(name: bytes) -> bool:
    """Whether JSON means by it what it says."""
    return 0 < len(name) <= _LONGEST_NAME and all(32 <= c < 127 and c not in b'"\\' for c in name)


def find_events(words: Words, names: Names, sizes: Sizes) -> Events:
    """The events that keep to the writer's forms.

    Args:
        words: a part of a file.
        names: takes in the operations' names.
        sizes: knows the arguments that were seen.
    """
    found = _Found(words, names, sizes)
    for kind, read in ((b"B", found.begins), (b"E", found.ends), (b"X", found.ticks), (b"i", found.marks)):
        found.good |= read(np.flatnonzero(found.kind == kind[0]))
    which = np.flatnonzero(found.good & (found.name >= 0) & (found.nbytes > UNREADABLE))
    return Events(
        found.start[which],
        found.end[which],
        found.kind[which],
        found.ts[which],
        found.pid[which],
        found.name[which],
        found.nbytes[which],
    )


class _Found:
    """All places where an event may begin, and what is read there; `at` are some of them."""

    def __init__(self, words: Words, names: Names, sizes: Sizes) -> None:
        self._words, self._names, self._sizes = words, names, sizes
        self.start = words.find(START)
        commas = words.all_of(",")
        self._commas = np.append(commas, [words.size] * _NO_COMMA)
        self._comma = np.searchsorted(commas, self.start + 10)
        self.kind = words.bytes[self.start + 8]
        count = len(self.start)
        self.good = np.zeros(count, np.bool_)
        self.end, self.name = self.start.copy(), np.zeros(count, np.int64)
        self.ts, self.pid = np.zeros(count), np.full(count, -1)
        self.nbytes = np.full(count, -1)

    def begins(self, at: Places) -> NDArray[np.bool_]:
        good, comma = self._named(at)
        pid_end, bare, is_pid = self._pid(at, comma)
        good &= is_pid & bare
        self.end[at] = pid_end + 1
        read, name_end = at[good], self._commas[self._comma[at[good]] + 1] - 1
        self.name[read] = self._names.find(self._words, self.start[read] + 21, name_end)
        return self._all(at, good)

    def ends(self, at: Places) -> NDArray[np.bool_]:
        good = self._words.are(self.start[at] + 9, b'", "ts": ')
        comma = self._comma[at] + 1
        good &= self._time(at, self.start[at] + 18, comma)
        pid_end, bare, is_pid = self._pid(at, comma)
        good &= is_pid
        self.end[at] = pid_end + 1
        sized = good & ~bare
        self._read_sizes(at[sized], pid_end[sized])
        return self._all(at, good)

    def ticks(self, at: Places) -> NDArray[np.bool_]:
        good, comma = self._named(at)
        pid_end, bare, is_pid = self._pid(at, comma)
        good &= is_pid & ~bare & self._words.are(pid_end, b', "dur": 0}')
        self.end[at] = pid_end + 11
        self.name[at], is_rank = self._words.numbers(self.start[at] + 21, self._commas[comma - 1] - 1)
        return self._all(at, good & is_rank)

    def marks(self, at: Places) -> NDArray[np.bool_]:
        good, comma = self._named(at)
        good &= self._words.are(self._commas[comma], b', "s": "g"}')
        self.end[at] = self._commas[comma] + 11
        return self._all(at, good)

    def _named(self, at: Places) -> tuple[NDArray[np.bool_], Places]:
        """Whether name and time stand there; the comma behind the time."""
        comma = self._comma[at] + 1
        good = self._words.are(self.start[at] + 9, b'", "name": "')
        good &= self._words.are(self._commas[comma] - 1, b'", "ts": ')
        return good & self._time(at, self._commas[comma] + 8, comma + 1), comma + 1

    def _time(self, at: Places, start: Places, comma: Places) -> NDArray[np.bool_]:
        end = self._commas[comma]
        self.ts[at], good = self._words.numbers(start, end)
        return good & (end < self._words.size)

    def _pid(self, at: Places, ts_comma: Places) -> tuple[Places, NDArray[np.bool_], NDArray[np.bool_]]:
        """Where pid ends, whether the event ends with it, and whether it stands there."""
        ts_end, following = self._commas[ts_comma], self._commas[ts_comma + 1]
        bare = self._words.bytes[following - 1] == ord("}")
        end = following - bare
        self.pid[at], good = self._words.numbers(ts_end + 9, end)
        return end, bare, good & self._words.are(ts_end, b', "pid": ') & (following < self._words.size)

    def _read_sizes(self, at: Places, start: Places) -> None:
        """Arguments end where the comma before the next event stands."""
        comma = np.append(self.start, self._words.size + 1)[at + 1] - 1
        self.end[at] = comma - (self._words.bytes[comma] == ord("\n"))
        sizes = self._sizes
        self.nbytes[at] = [sizes[text] for text in self._words.cuts(start, self.end[at])]

    def _all(self, at: Places, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        every = np.zeros(len(self.start), np.bool_)
        every[at[good]] = True
        return every
