"""Iterable data sets by position, so that their samples do not depend on the number of ranks, either.

torchdata's StatefulDataLoader saves the state of each loader process: that is a position only for the same number of
ranks and processes.
"""

from __future__ import annotations

import copy
import hashlib
import random
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker

from hvdtrain.data.order import mix_seed
from hvdtrain.errors import DataError

_COMPARED = 4  # samples to compare after a state was loaded


def is_iterable(dataset: Any) -> bool:
    """Return whether samples can only be read one after the other."""
    if (hasattr(dataset, "__getitem__") or not hasattr(dataset, "__iter__")) and not hasattr(dataset, "by_position"):
        return isinstance(dataset, IterableDataset)
    return True


class IterableSamples(Dataset[Any]):
    """An iterable data set, indexed by position. At its end, its next pass follows.

    It reads all samples up to the one that is asked for. Before each, the random generators of torch, Python and numpy
    are seeded by position, so all ranks read the same. Positions should grow: for one before those kept, it reads from
    the start.

    The data set may have the methods `set_epoch`, called before each pass with its number, and `state_dict` and
    `load_state_dict`. A resume then reads only what follows, if the state leads to the same samples.

    `keep`: number of samples that can be asked for again. `state`: a result of `state`; empty for the start. `warn`:
    whether to warn if the data set's state leads to other samples.

    Errors: DataError: when it is read: the data set has no samples, is its own iterator, or has an invalid state.
    """

    def __init__(self, dataset: Any, seed: int, keep: int, state: dict[str, Any], *, warn: bool = True) -> None:
        self._dataset, self._seed, self._start, self._warn = dataset, seed, state, warn
        self._kept: deque[tuple[int, Any]] = deque(maxlen=max(keep, _COMPARED))
        self._source = dataset
        self._samples: Iterator[Any] | None = None
        self._epoch = self._begin = self._next = 0
        self._noted: dict[str, Any] = {}
        self._hashes: list[str] | None = None

    def __getitem__(self, position: int) -> Any:
        if self._samples is None:
            self._open(self._start)
        if position < self._next and position not in dict(self._kept):
            self._open(self._start if self._start.get("position", 0) <= position else {})
        while self._next <= position:
            self._kept.append((self._next, self._read()))
        return dict(self._kept)[position]

    def note_place(self) -> None:
        """Note the current place, for `state`."""
        if self._samples is None and self._open(self._start):
            self._noted = self._start
            return
        self._noted, self._hashes = {"epoch": self._epoch, "begin": self._begin, "position": self._next}, None
        if hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict"):
            self._hashes = []
            self._noted |= {"state": self._source.state_dict(), "hashes": self._hashes}

    def state(self) -> bytes:
        """Return the noted place as JSON, with hashes of the first samples after it."""
        try:
            return orjson.dumps(self._noted)
        except TypeError as error:
            raise DataError(
                f"the state of the data set cannot be saved: {error}",
                expected="a state_dict() of numbers, strings, lists, and dicts with strings as keys",
                found=type(self._source).__name__,
            ) from error

    def _open(self, state: dict[str, Any]) -> bool:
        """Go to a noted place; if there is no state of the data set that leads there, to the beginning of its pass.

        Returns whether there is one. The samples to compare were then read.
        """
        self._kept.clear()
        self._epoch, self._begin = state.get("epoch", 0), state.get("begin", 0)
        if "state" not in state:
            self._start_pass(self._begin)
            return False
        self._start_pass(state["position"], state["state"])
        self._hashes = []
        read = [(self._next, self._read()) for _ in state["hashes"]]
        if self._hashes == state["hashes"]:
            self._kept.extend(read)
            return True
        if self._warn:
            warnings.warn(
                "the data set's state_dict leads to other samples than before, as that of a shuffling buffer can: the"
                " samples before the position of the resume are read again instead",
                stacklevel=2,
            )
        self._epoch, self._begin = state["epoch"], state["begin"]
        self._start_pass(self._begin)
        return False

    def _start_pass(self, position: int, state: Any = None) -> None:
        self._next = position
        seed_generators(mix_seed(self._seed, position))
        self._source = self._copy()
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(self._epoch)
        if state is not None:
            self._source.load_state_dict(state)
        worker._worker_info = None  # one process reads all: a data set that divides itself among processes must not
        self._samples = iter(self._source)
        if self._samples is self._source:
            raise DataError(
                "the data set can be read only once",
                expected="an __iter__ that returns a new iterator for each pass, such as a generator function",
                found=f"{type(self._source).__name__}, which is its own iterator",
            )

    def _copy(self) -> Any:
        """Return a copy of the data set; it has its own state, so that other readers keep their places."""
        if not hasattr(self._dataset, "load_state_dict"):
            return copy.copy(self._dataset)
        try:
            return copy.deepcopy(self._dataset)
        except Exception as error:
            raise DataError(
                f"the data set cannot be copied: {error}",
                expected="copy.deepcopy(dataset) works, because it has load_state_dict",
                found=type(self._dataset).__name__,
            ) from error

    def _read(self) -> Any:
        assert self._samples is not None
        seed_generators(mix_seed(self._seed, self._next))
        for _ in range(2):
            try:
                sample = next(self._samples)
                break
            except StopIteration:
                self._epoch, self._begin = self._epoch + 1, self._next
                self._start_pass(self._next)
        else:
            raise DataError(
                "the data set is empty",
                expected="one sample or more in each pass",
                found=f"no sample in pass {self._epoch} of {type(self._source).__name__}",
            )
        self._next += 1
        if self._hashes is not None and len(self._hashes) < _COMPARED:
            self._hashes.append(sample_hash(sample))
        return sample


def seed_generators(value: int) -> None:
    """Seed the random generators of torch on the CPU, of Python and of numpy."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def sample_hash(sample: Any) -> str:
    """Return a hash of the numbers, texts and arrays in a sample; of other objects, of their types."""
    found = hashlib.sha256()
    for leaf in tree_leaves(sample):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            found.update(leaf.tobytes())
        else:
            plain = isinstance(leaf, (int, float, complex, str, bytes, type(None)))
            found.update(repr(leaf if plain else type(leaf)).encode())
    return found.hexdigest()[:16]
