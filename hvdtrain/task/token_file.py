"""Token ids in one memory-mapped file, ours or a user's .npy, and the windows of it that a model trains on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.errors import DataError
from hvdtrain.files import open_regular, write_text
from hvdtrain.task.encode import Ids

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset

    TensorDataset = Dataset[Tensor]
else:
    TensorDataset = object

FORMAT = 1  # version of the cached files; others are built again

_ABOUT = "about.json"
_TOKENS = "tokens.bin"
_PROGRESS = "progress.json"
_SAVE_S = 5.0  # between two notes of the progress
_STRIDE = 1 << 22
_NPY_EXPECTED = "a .npy file of token ids, as numpy.save writes a one-dimensional array of integers"
_NPY_NEXT = "write or copy the file again, or correct --data.tokens"


@dataclass(frozen=True)
class TokenFile:
    """A file of ids: those to train on, then the held-out ones. `train`, `heldout`: numbers of ids."""

    path: str
    dtype: str  # numpy's name of the ids' type, with byte order
    offset_bytes: int  # offset of the first id
    train: int
    heldout: int
    vocabulary: int  # one more than the largest id
    digest: str  # SHA-256 of the ids as stored, equal on all hosts with the same data
    note: str = ""  # a line to show about them

    def save(self, folder: Path) -> None:
        """Write this description into `folder`. A file in that folder has a relative path."""
        (folder / _ABOUT).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TokenFile | None:
        """Read the description that `save` wrote; None if it or the file is incomplete."""
        try:
            about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            if about.pop("format") != FORMAT:
                return None
            about["path"] = str(folder / about["path"])
            file = cls(**about)
            size_bytes = file.offset_bytes + (file.train + file.heldout) * np.dtype(file.dtype).itemsize
            return file if Path(file.path).stat().st_size >= size_bytes else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def map(self) -> Ids:
        """Map all ids, of shape (train + heldout,). Pages load on access."""
        mapped = np.memmap(
            self.path, np.dtype(self.dtype), mode="r", offset=self.offset_bytes, shape=(self.train + self.heldout,)
        )
        return np.asarray(mapped)  # a plain array: slicing a memmap takes microseconds


def write_tokens(
    folder: Path,
    train: Iterable[Ids],
    heldout: Iterable[Ids] | None,
    *,
    tail: float,
    vocabulary: int,
    note: Callable[[], str] = str,
    skip: Callable[[int], None] = lambda pieces: None,
) -> TokenFile:
    """Write ids to a file in `folder`, and describe it there. What a killed process left there is continued.

    `train`: ids to train on, in pieces of shape (n,). `heldout`: held-out ids, likewise; None to hold out the last ids
    of `train`. `tail`: fraction of `train` to hold out if `heldout` is None. `note`: called at the end for a line about
    the ids. `skip`: called before each of both with the number of pieces that are written already, and ignored.
    """
    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    digest = hashlib.sha256()
    counts, pieces_done = _read_progress(folder)
    with (folder / _TOKENS).open("r+b" if sum(counts) else "w+b") as file:
        for _ in range(sum(counts) // _STRIDE + 1):
            left = sum(counts) * dtype.itemsize - file.tell()
            digest.update(file.read(min(left, _STRIDE * dtype.itemsize)))
        file.truncate()
        saved_s = time.monotonic()
        for part, pieces in enumerate([train] if heldout is None else [train, heldout]):
            skip(before := pieces_done[part])
            for number, piece in enumerate(pieces, 1):
                if number <= before:
                    continue
                content = piece.astype(dtype).tobytes()
                digest.update(content)
                file.write(content)
                counts[part] += len(piece)
                pieces_done[part] = number
                if time.monotonic() - saved_s > _SAVE_S:
                    file.flush()
                    os.fsync(file.fileno())
                    write_text(folder / _PROGRESS, json.dumps([counts, pieces_done]))
                    saved_s = time.monotonic()
    (folder / _PROGRESS).unlink(missing_ok=True)
    train_count, heldout_count = counts
    if heldout is None:
        heldout_count = int(train_count * tail)
        train_count -= heldout_count
    about = TokenFile(_TOKENS, dtype.str, 0, train_count, heldout_count, vocabulary, digest.hexdigest(), note())
    about.save(folder)
    return about


def _read_progress(folder: Path) -> tuple[list[int], list[int]]:
    """Return the numbers of ids and pieces to train on, and held out, that a killed process has written."""
    try:
        (train, heldout), (train_pieces, heldout_pieces) = json.loads((folder / _PROGRESS).read_text())
        return [int(train), int(heldout)], [int(train_pieces), int(heldout_pieces)]
    except (OSError, ValueError, TypeError):
        return [0, 0], [0, 0]


def describe_npy(path: Path, tail: float) -> TokenFile:
    """Check each id of a user's .npy file, and describe the file, to use it in place.

    The fraction `tail` of the ids, at the end, is held out.

    Errors: DataError: it is no .npy file, is empty, has other than one dimension or integers, or has a negative id.
    """
    ids = _mapped(path)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = f"dtype {ids.dtype}, shape {ids.shape}"
        raise DataError(f"{path} contains no tokens", expected=_NPY_EXPECTED, found=found, next_step=_NPY_NEXT)
    if not len(ids):
        raise DataError(f"{path} is empty", expected=_NPY_EXPECTED, found="an array without elements")
    digest, smallest, largest = hashlib.sha256(), 0, 0
    for begin in range(0, len(ids), _STRIDE):
        part = ids[begin : begin + _STRIDE]
        smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
        digest.update(part.tobytes())
    if smallest < 0:
        raise DataError(f"{path} contains negative ids", expected="ids of 0 or more", found=str(smallest))
    heldout = int(len(ids) * tail)
    return TokenFile(str(path), ids.dtype.str, ids.offset, len(ids) - heldout, heldout, largest + 1, digest.hexdigest())


def _mapped(path: Path) -> np.memmap[Any, Any]:
    try:
        open_regular(path).close()  # numpy would block on a FIFO
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"cannot read the tokens {path}",
            expected=_NPY_EXPECTED,
            found=error.strerror or str(error),
            next_step="correct --data.tokens",
        ) from error
    except (ValueError, EOFError) as error:  # no .npy file, a pickle, an array of objects, a truncated file
        found = "pickled objects, or a file of another format" if "pickle" in str(error) else str(error)
        if "mmap length" in found:
            found = f"fewer bytes than the file's header says: {path.stat().st_size:,}"
        raise DataError(
            f"{path} contains no tokens", expected=_NPY_EXPECTED, found=found, next_step=_NPY_NEXT
        ) from error
    if not isinstance(loaded, np.memmap):
        loaded.close()
        found = "an archive of arrays (.npz)"
        raise DataError(f"{path} contains no tokens", expected=_NPY_EXPECTED, found=found, next_step=_NPY_NEXT)
    return loaded


class Windows(TensorDataset):
    """Windows of seq_len + 1 ids at distances of seq_len, of `count` ids from index `start` on.

    Each token is a target once, except the first and a tail. Windows overlap in one id: the last target of one is the
    first input of the next. A pickle contains the path of the file, not the ids.
    """

    overlap = 1  # id

    def __init__(self, file: TokenFile, start: int, count: int, seq_len: int) -> None:
        self.file = file
        self.start = start
        self.count = count
        self.seq_len = seq_len
        self._ids: Ids | None = None

    def __len__(self) -> int:
        return max(0, (self.count - self.overlap) // (self.seq_len + 1 - self.overlap))

    def __getitem__(self, index: int) -> Tensor:
        """Return the ids of a window: (seq_len + 1,), int64."""
        import torch

        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index * (self.seq_len + 1 - self.overlap)
        return torch.from_numpy(self.ids()[begin : begin + self.seq_len + 1].astype("int64"))

    def ids(self) -> Ids:
        """Map the ids of all windows, and those after the last one: (count,)."""
        if self._ids is None:
            self._ids = self.file.map()[self.start : self.start + self.count]
        return self._ids

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}


class Rows(Windows):
    """Windows of seq_len + 1 ids that do not overlap, such as packed conversations."""

    overlap = 0
