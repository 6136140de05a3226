"""Columns that grow: in memory while small, else in temporary files."""

from __future__ import annotations

import tempfile
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Column:
    """A column to which arrays are added; one larger than `in_memory_bytes` is written to disk."""

    def __init__(self, dtype: DTypeLike, in_memory_bytes: int = 1 << 23) -> None:
        self._dtype = np.dtype(dtype)
        self._limit = in_memory_bytes
        self._in_memory = bytearray()
        self._file: IO[bytes] | None = None

    def add(self, values: NDArray[Any]) -> None:
        """Append a copy of `values`."""
        self._in_memory += values.astype(self._dtype).tobytes()
        if len(self._in_memory) > self._limit:
            self._spill()

    def finish(self) -> NDArray[Any]:
        """Return the whole column: an array in memory, or one that maps the file."""
        if self._file is not None:
            self._spill()
            with self._file:
                if not self._in_memory:
                    mapped: NDArray[Any] = np.memmap(self._file, self._dtype, mode="c")
                    return mapped.view(np.ndarray)
                self._file.seek(0)  # the disk is full
                self._in_memory[:0] = self._file.read()
        return np.frombuffer(self._in_memory, self._dtype)

    def _spill(self) -> None:
        """Move the bytes in memory to disk; they stay in memory if the disk is full."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="hvdtrain-", buffering=0)  # noqa: SIM115 - until `finish`
            while self._in_memory:
                del self._in_memory[: self._file.write(self._in_memory)]
        except OSError:
            self._limit = 1 << 62
