"""Load the micro-batches of a rank in order, from any position, with torch's DataLoader."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.loader_processes import batches_of_processes, end_with_rank, signals_blocked
from hvdtrain.data.mixture import sample_order
from hvdtrain.data.order import MicroBatch, micro_batches, mix_seed, positions_without
from hvdtrain.data.sample_order import SampleOrder
from hvdtrain.errors import DataError

_SAMPLE, _FORWARD = 1, 2
"""Offsets of the seed for the random state that makes samples, and for that of the forward pass."""

_STEPS_AT_ONCE = 64
"""Steps to order at once: a numpy call costs about 10 us, a sample 0.1 us."""


@dataclass(frozen=True)
class Stream:
    """The share of one rank in the endless stream of samples.

    Attributes:
        dataset: map-style, at least one sample.
        global_batch: samples per step.
        micro_batch: samples per forward pass.
        left_out: ranges [begin, end) of positions to skip, in order.
        uniform: whether ranks with fewer micro-batches draw `repeated` ones.
    """

    dataset: Dataset[Any]
    seed: int
    global_batch: int
    micro_batch: int
    rank: int
    size: int
    left_out: Sequence[Sequence[int]] = ()
    uniform: bool = False

    def step(self, position: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank in the step that starts at `position`."""
        parts = positions_without(position, self.global_batch, self.left_out)
        return micro_batches(parts, self.micro_batch, self.rank, self.size)

    def repeated(self, position: int) -> list[MicroBatch]:
        """Return micro-batches of rank 0, which has the most, that this rank repeats so that it has as many."""
        if not self.uniform:
            return []
        parts = positions_without(position, self.global_batch, self.left_out)
        return micro_batches(parts, self.micro_batch, 0, self.size)[len(self.step(position)) :]

    def position_after(self, position: int) -> int:
        """Return the position after the step that starts at `position`."""
        return positions_without(position, self.global_batch, self.left_out)[-1][1]

    def order(self) -> SampleOrder:
        """Return the order of the data set's samples."""
        return sample_order(self.dataset, dataset_length(self.dataset), self.seed)

    def keys(self, position: int, steps: int) -> Iterator[list[int]]:
        """Yield for each micro-batch of the next `steps` steps its seed, then the indices of its samples.

        In each step, the repeated ones come last.
        """
        order = self.order()
        for first in range(0, steps, _STEPS_AT_ONCE):
            batches: list[MicroBatch] = []
            for _ in range(first, min(first + _STEPS_AT_ONCE, steps)):
                batches += [*self.step(position), *self.repeated(position)]
                position = self.position_after(position)
            if not batches:
                continue
            positions = np.concatenate([np.arange(b.start, b.stop, dtype=np.int64) for b in batches])
            indices = order.indices(positions).tolist()
            used = 0
            for batch in batches:
                count = batch.stop - batch.start
                yield [sample_seed(self.seed, batch), *indices[used : used + count]]
                used += count


def sample_seed(seed: int, batch: MicroBatch) -> int:
    """Return the seed of the random state that makes the samples of a micro-batch."""
    return mix_seed(seed + _SAMPLE, batch.start)


class HostBatch(NamedTuple):
    """A micro-batch on the host: the indices of its samples in the data set, int64, and the samples, later collated."""

    indices: bytes
    batch: Any


class Seeded(Dataset[Any]):
    """A data set with samples that depend only on position, even if making them uses random numbers.

    A key is a seed, then the indices of a micro-batch.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, key: list[int]) -> HostBatch:
        seed, *indices = key
        _seed_host(seed)
        return HostBatch(array("q", indices).tobytes(), [self.dataset[index] for index in indices])


@dataclass(frozen=True)
class _Collated:
    """Collates the samples of a micro-batch in the process that made them."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: Any) -> HostBatch:  # a HostBatch of samples; torch's annotations expect a list
        return HostBatch(samples.indices, self.collate(samples.batch))


def _seed_host(seed: int) -> None:
    """Seed the random generators of torch on the CPU, of Python and of numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_forward(seed: int, position: int) -> None:
    """Seed torch, Python and numpy for the forward pass of the micro-batch that starts at `position`."""
    value = mix_seed(seed + _FORWARD, position)
    _seed_host(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def fetch_step(stream: Stream, position: int) -> Iterator[tuple[MicroBatch, list[int], list[Any]]]:
    """Yield a step's micro-batches of this rank, their indices and samples, made in this process.

    It seeds the random states as training does. The caller restores them.
    """
    seeded = Seeded(stream.dataset)
    for batch, key in zip(stream.step(position), stream.keys(position, 1), strict=True):
        yield batch, key[1:], seeded.__getitems__(key).batch


def train_batches(
    stream: Stream,
    position: int,
    steps: int,
    config: LoaderConfig,
    collate: Callable[[list[Any]], Any] | None,
    *,
    on_cuda: bool,
) -> Iterator[HostBatch]:
    """Yield the batches of this rank for `steps` steps from `position` on, in the order of `Stream.step`."""
    keys = partial(stream.keys, position, steps)
    return iter(Batches(stream.dataset, keys, config, collate, on_cuda=on_cuda, persistent=False))


class Batches:
    """Batches on the host, loaded according to the loader's options.

    Args:
        keys: called at each iteration; yields for each batch a seed, then the indices of its samples.
        collate: makes a batch of samples; None for torch's function.
        persistent: keep the loader processes for the next iteration.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        keys: Callable[[], Iterator[list[int]]],
        config: LoaderConfig,
        collate: Callable[[list[Any]], Any] | None,
        *,
        on_cuda: bool,
        persistent: bool,
    ) -> None:
        self._loader: DataLoader[Any] = DataLoader(
            Seeded(dataset),
            batch_sampler=_Sampler(keys),
            collate_fn=_Collated(collate or default_collate),
            num_workers=config.workers,
            prefetch_factor=config.prefetch if config.workers else None,
            # Threads of MPI and Horovod are running: a plain fork could inherit a lock that nobody releases.
            multiprocessing_context="forkserver" if config.workers else None,
            worker_init_fn=end_with_rank,
            pin_memory=config.pin_memory == "on" or (config.pin_memory == "auto" and on_cuda),
            persistent_workers=persistent and config.workers > 0,
        )

    def __iter__(self) -> Iterator[HostBatch]:
        if not self._loader.num_workers:
            return iter(self._loader)
        with signals_blocked():
            batches = iter(self._loader)
        return batches_of_processes(batches, batches._workers)  # type: ignore[attr-defined]


class _Sampler:
    """A batch sampler that makes its batches on demand."""

    def __init__(self, batches: Callable[[], Iterator[list[int]]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches()


def dataset_length(dataset: Dataset[Any], least: int = 1) -> int:
    """Return the number of samples, `least` or more.

    Errors:
        DataError: the data set is empty, or has no valid length or index.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "the data set cannot be indexed",
            expected="a map-style data set with __len__ and __getitem__, because any rank must reach any sample",
            found=type(dataset).__name__,
        )
    length: Any = dataset.__len__()
    if not isinstance(length, int) or length < 0:
        raise DataError(
            "the data set has an invalid length", expected="a whole number of 0 or more from len()", found=f"{length!r}"
        )
    if length < least:
        raise DataError(
            "the data set is empty", expected="one sample or more", found=f"an empty {type(dataset).__name__}"
        )
    return length
