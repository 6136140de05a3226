"""Columns that grow: in memory while small, else in temporary files."""

from __future__ import annotations

import tempfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


class Column:
    """A column to which arrays are added; one larger than `in_memory_bytes` is written to disk."""

    def __init__(self, dtype: str, in_memory_bytes: int = 1 << 23) -> None:
        self._dtype = np.dtype(dtype)
        self._limit = in_memory_bytes
        self._parts: list[NDArray[Any]] = []
        self._in_memory = 0
        self._file: IO[bytes] | None = None
        self._on_disk = 0

    def add(self, values: NDArray[Any]) -> None:
        """Append a copy of `values`."""
        self._parts.append(values.astype(self._dtype))
        self._in_memory += self._parts[-1].nbytes
        if self._in_memory > self._limit:
            self._spill()

    def finish(self) -> NDArray[Any]:
        """Return the whole column: an array in memory, or one that maps the file."""
        if self._file is None:
            return np.concatenate([np.empty(0, self._dtype), *self._parts])
        self._spill()
        with self._file:
            if self._parts:  # the disk is full
                self._file.seek(0)
                return np.concatenate([np.fromfile(self._file, self._dtype, self._on_disk), *self._parts])
            mapped: NDArray[Any] = np.memmap(self._file, self._dtype, mode="c", shape=(self._on_disk,))
            return mapped.view(np.ndarray)

    def _spill(self) -> None:
        """Move the elements in memory to disk; they stay in memory if the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="hvdtrain-", buffering=0)  # noqa: SIM115 - until `finish`
            while self._parts:
                self._file.seek(self._on_disk * self._dtype.itemsize)
                rest = self._parts[0].view(np.uint8).data
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._on_disk += len(self._parts.pop(0))
            self._in_memory = 0
        except OSError:
            self._limit = 1 << 62
