"""The micro-batches of a rank, in order, from any position on: torch's DataLoader over `order`."""

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
from hvdtrain.data.loader_processes import end_with_rank, signals_blocked, watched
from hvdtrain.data.order import MicroBatch, micro_batches, mix, passing_over, samples, share
from hvdtrain.errors import DataError

_SAMPLE, _FORWARD = 1, 2
"""What a random state is for: making the samples of a micro-batch, or its forward pass."""

_STEPS_AT_ONCE = 64
"""Steps whose order is computed together: numpy's cost a call is some 10 us, that of a sample 0.1."""


@dataclass(frozen=True)
class Stream:
    """The share of one rank in the endless stream of samples.

    Attributes:
        dataset: map-style, at least one sample.
        seed: of order and randomness.
        global_batch: samples a step.
        micro_batch: samples a forward pass.
        rank: this rank.
        size: number of ranks.
        left_out: ranges [begin, end) of positions that are passed over, in order.
    """

    dataset: Dataset[Any]
    seed: int
    global_batch: int
    micro_batch: int
    rank: int
    size: int
    left_out: Sequence[Sequence[int]] = ()

    def step(self, position: int) -> list[MicroBatch]:
        """Micro-batches of this rank in the step that starts at `position`."""
        parts = passing_over(position, self.global_batch, self.left_out)
        batches = [batch for begin, end in parts for batch in micro_batches(begin, end - begin, self.micro_batch)]
        return [batches[i] for i in share(len(batches), self.rank, self.size)]

    def after(self, position: int) -> int:
        """The position behind the step that starts at `position`."""
        return passing_over(position, self.global_batch, self.left_out)[-1][1]

    def keys(self, position: int, steps: int) -> Iterator[list[int]]:
        """For each micro-batch of the next `steps` steps: the seed it is made under, then its samples' indices."""
        length = dataset_length(self.dataset)
        for first in range(0, steps, _STEPS_AT_ONCE):
            batches: list[MicroBatch] = []
            for _ in range(first, min(first + _STEPS_AT_ONCE, steps)):
                batches += self.step(position)
                position = self.after(position)
            if not batches:
                continue
            positions = np.concatenate([np.arange(b.start, b.stop, dtype=np.int64) for b in batches])
            indices = samples(positions, length, self.seed).tolist()
            taken = 0
            for batch in batches:
                count = batch.stop - batch.start
                yield [sample_seed(self.seed, batch), *indices[taken : taken + count]]
                taken += count


def sample_seed(seed: int, batch: MicroBatch) -> int:
    """What the samples of a micro-batch are made under."""
    return mix(seed + _SAMPLE, batch.start)


class Drawn(NamedTuple):
    """A micro-batch on the host.

    Attributes:
        indices: into the data set, of the samples that were taken from it: int64.
        batch: the samples, collated.
    """

    indices: bytes
    batch: Any


class _Samples(list[Any]):
    """Samples, and the indices they were taken by."""

    indices: bytes


class Seeded(Dataset[Any]):
    """A data set whose samples depend on position alone, also where making them draws random numbers.

    A key is a seed, then the indices of a micro-batch.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitems__(self, key: list[int]) -> _Samples:
        seed, *indices = key
        _seed_host(seed)
        samples = _Samples([self.dataset[index] for index in indices])
        samples.indices = array("q", indices).tobytes()
        return samples


@dataclass(frozen=True)
class _Collated:
    """Collates where the samples are made, and says what they are."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> Drawn:
        assert isinstance(samples, _Samples)
        return Drawn(samples.indices, self.collate(samples))


def _seed_host(seed: int) -> None:
    """Seed torch's generator of the CPU, Python's and numpy's."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_forward(seed: int, position: int) -> None:
    """Seed torch, Python and numpy for the forward pass of the micro-batch that starts at `position`."""
    value = mix(seed + _FORWARD, position)
    _seed_host(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def fetch_step(stream: Stream, position: int) -> Iterator[tuple[MicroBatch, list[int], list[Any]]]:
    """A step's micro-batches of this rank, made in this process: where, indices into the data set, samples.

    Random states are seeded as in training; who calls puts them back.
    """
    seeded = Seeded(stream.dataset)
    for batch, key in zip(stream.step(position), stream.keys(position, 1), strict=True):
        yield batch, key[1:], seeded.__getitems__(key)


def train_batches(
    stream: Stream,
    position: int,
    steps: int,
    config: LoaderConfig,
    collate: Callable[[list[Any]], Any] | None,
    *,
    on_cuda: bool,
) -> Iterator[Drawn]:
    """Batches of this rank on the host, from `position` on for `steps` steps, in the order of `Stream.step`."""
    keys = partial(stream.keys, position, steps)
    return iter(Batches(stream.dataset, keys, config, collate, on_cuda=on_cuda, stay=False))


class Batches:
    """Batches on the host, made as a job's options of the loader say.

    Args:
        dataset: map-style.
        keys: called at each iteration: for each batch a seed, then the indices of its samples.
        config: of the loader.
        collate: makes a batch of samples; None for torch's own.
        on_cuda: whether batches go to a CUDA device.
        stay: whether loader processes stay for the next iteration.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        keys: Callable[[], Iterator[list[int]]],
        config: LoaderConfig,
        collate: Callable[[list[Any]], Any] | None,
        *,
        on_cuda: bool,
        stay: bool,
    ) -> None:
        self._loader: DataLoader[Any] = DataLoader(
            Seeded(dataset),
            batch_sampler=_Sampler(keys),
            collate_fn=_Collated(collate or default_collate),
            num_workers=config.workers,
            prefetch_factor=config.prefetch if config.workers else None,
            # MPI's and Horovod's threads are running: a plain fork could inherit a lock that nobody will release.
            multiprocessing_context="forkserver" if config.workers else None,
            worker_init_fn=end_with_rank,
            pin_memory=config.pin_memory == "on" or (config.pin_memory == "auto" and on_cuda),
            persistent_workers=stay and config.workers > 0,
        )

    def __iter__(self) -> Iterator[Drawn]:
        if not self._loader.num_workers:
            return iter(self._loader)
        with signals_blocked():
            batches = iter(self._loader)
        return watched(batches, batches._workers)  # type: ignore[attr-defined]


class _Sampler:
    """A batch sampler whose batches are made as they are asked for."""

    def __init__(self, batches: Callable[[], Iterator[list[int]]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches()


def dataset_length(dataset: Dataset[Any], least: int = 1) -> int:
    """Number of samples, `least` or more.

    Errors:
        DataError: the data set is empty, or is not one that can be indexed.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "the data set cannot be indexed",
            expected="a map-style data set with __len__ and __getitem__: any rank must reach any sample",
            found=type(dataset).__name__,
        )
    length: Any = dataset.__len__()
    if not isinstance(length, int) or length < 0:
        raise DataError(
            "the data set's length is none", expected="a whole number of 0 or more by len()", found=f"{length!r}"
        )
    if length < least:
        raise DataError("the data set is empty", expected="one sample or more", found=f"{type(dataset).__name__} of 0")
    return length
