"""Load the micro-batches of a rank in order, from any position, with torch's DataLoader."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.iterable import IterableSamples, is_iterable, seed_generators
from hvdtrain.data.loader_processes import batches_of_processes, end_with_rank, signals_blocked
from hvdtrain.data.mixture import sample_order
from hvdtrain.data.order import (
    MicroBatch,
    SampleOrder,
    Workers,
    count_micro_batches,
    mix_seed,
    positions_without,
    rank_share,
    take_micro_batches,
)
from hvdtrain.data.tree import Positions
from hvdtrain.errors import DataError

_SAMPLE, _FORWARD = 1, 2
"""Offsets of the seed for the random state that makes samples, and for that of the forward pass."""

_STEPS_AT_ONCE = 64  # steps to order at once: a numpy call costs about 10 us, a sample 0.1 us


class StepShare(NamedTuple):
    """What a rank draws in a step."""

    batches: list[MicroBatch]
    repeated: list[MicroBatch]  # of other ranks, with weight 0
    end: int  # the position after the step
    positions: Positions  # of the micro-batches of all ranks within the step

    def later(self, samples: int) -> StepShare:
        """Return the same some samples later."""
        batches, repeated = ([MicroBatch(b.start + samples, b.stop + samples) for b in each] for each in self[:2])
        return StepShare(batches, repeated, self.end + samples, self.positions)


@dataclass(frozen=True)
class Stream:
    """The share of one rank in the endless stream of samples.

    `shares`: micro-batches of each rank in a step; None for equal ones, also in a step with another number of them.
    """

    dataset: Dataset[Any]  # map-style with at least one sample, or iterable
    seed: int
    global_batch: int  # samples per step
    micro_batch: int  # samples per forward pass
    rank: int
    size: int
    left_out: Sequence[Sequence[int]] = ()  # ranges [begin, end) of positions to skip, in order
    uniform: bool = False  # whether ranks with fewer micro-batches draw `repeated` ones
    in_turn: bool = False  # whether micro-batches go round the ranks: those of a pass of all ranks are neighbours
    data_state: dict[str, Any] = field(default_factory=dict)  # place in an iterable data set, of `HostBatch.data_state`
    shares: tuple[int, ...] | None = None
    workers: Workers | None = None  # that train apart, each with a share of the micro-batches

    def equal_shares(self) -> list[int]:
        """Return the micro-batches of each rank in a step, if they are divided equally."""
        return [len(rank_share(-(-self.global_batch // self.micro_batch), r, self.size)) for r in range(self.size)]

    def step(self, position: int) -> list[MicroBatch]:
        """Return the micro-batches of this rank in the step that starts at `position`."""
        return [batch for own in self.by_worker(position) for batch in own]

    def by_worker(self, position: int) -> list[list[MicroBatch]]:
        """Return the same for each worker that this rank serves; without workers, one list."""
        parts = positions_without(position, self.global_batch, self.left_out)
        count = count_micro_batches(parts, self.micro_batch)
        shares = [self._share(count, self.rank)] if self.workers is None else self.workers.shares(count, self.rank)
        return [take_micro_batches(parts, self.micro_batch, share) for share in shares]

    def repeated(self, position: int) -> list[MicroBatch]:
        """Return what this rank draws again to have as many micro-batches as rank 0: its last one, or rank 0's."""
        if not self.uniform:
            return []
        parts = positions_without(position, self.global_batch, self.left_out)
        first = self._share(count_micro_batches(parts, self.micro_batch), 0)
        most, own = take_micro_batches(parts, self.micro_batch, first), self.step(position)
        return (own or most)[-1:] * (len(most) - len(own))

    def positions(self, position: int) -> Positions:
        """Return which micro-batches of the step that starts at `position` each rank has."""
        count = count_micro_batches(positions_without(position, self.global_batch, self.left_out), self.micro_batch)
        return Positions(count, tuple(self._share(count, rank) for rank in range(self.size)))

    def _share(self, count: int, rank: int) -> range:
        if self.in_turn:
            return range(rank, count, self.size)
        if self.shares is not None and sum(self.shares) == count:
            start = sum(self.shares[:rank])
            return range(start, start + self.shares[rank])
        return rank_share(count, rank, self.size)

    def position_after(self, position: int) -> int:
        """Return the position after the step that starts at `position`."""
        return positions_without(position, self.global_batch, self.left_out)[-1][1]

    def steps(self, position: int, count: int) -> Iterator[StepShare]:
        """Yield the share of this rank in each of `count` steps from `position` on."""
        hole_end = self.left_out[-1][1] if self.left_out else 0
        begin, share = -1, StepShare([], [], position, Positions(0, ()))
        for _ in range(count):
            if begin >= hole_end:  # each further step is like the one before
                begin, share = share.end, share.later(self.global_batch)
            else:
                begin = share.end
                share = StepShare(
                    self.step(begin), self.repeated(begin), self.position_after(begin), self.positions(begin)
                )
            yield share

    def order(self) -> SampleOrder:
        """Return the order of the data set's samples."""
        return sample_order(self.dataset, training_samples(self.dataset), self.seed)

    def indexed(self) -> Any:
        """Return the data set; an iterable one by position, from `data_state` on."""
        if not is_iterable(self.dataset):
            return self.dataset
        if hasattr(self.dataset, "by_position"):
            return self.dataset.by_position(self.seed, self.data_state, self.global_batch)
        seed, warn = self.seed + _SAMPLE, self.rank == 0
        return IterableSamples(self.dataset, seed, self.micro_batch, self.data_state, warn=warn)

    def keys(self, position: int, steps: int) -> Iterator[list[int]]:
        """Yield for each micro-batch of the next `steps` steps its seed, then the indices of its samples.

        In each step, the repeated ones come last.
        """
        order, shares = self.order(), self.steps(position, steps)
        for _ in range(0, steps, _STEPS_AT_ONCE):
            batches = [b for share in islice(shares, _STEPS_AT_ONCE) for b in (*share.batches, *share.repeated)]
            if not batches:
                continue
            seeds = mix_seed(self.seed + _SAMPLE, np.array([batch.start for batch in batches], np.uint64)).tolist()
            positions = np.concatenate([np.arange(b.start, b.stop, dtype=np.int64) for b in batches])
            indices, used = order.indices(positions).tolist(), 0
            for seed, batch in zip(seeds, batches, strict=True):
                begin, used = used, used + batch.stop - batch.start
                yield [seed, *indices[begin:used]]


def sample_seed(seed: int, batch: MicroBatch) -> int:
    """Return the seed of the random state that makes the samples of a micro-batch."""
    return mix_seed(seed + _SAMPLE, batch.start)


class HostBatch(NamedTuple):
    """A micro-batch on the host."""

    indices: bytes  # of its samples in the data set, int64
    batch: Any  # the samples, later collated
    data_state: bytes = b""  # a place in an iterable data set before these samples, as JSON; "" for other data sets


class Seeded(Dataset[Any]):
    """A data set with samples that depend only on position, even if making them uses random numbers.

    A key is a seed, then the indices of a micro-batch.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, key: list[int]) -> HostBatch:
        seed, *indices = key
        numbers = array("q", indices).tobytes()
        if hasattr(self.dataset, "note_place"):
            self.dataset.note_place()
            return HostBatch(numbers, [self.dataset[index] for index in indices], self.dataset.state())
        seed_generators(seed)
        return HostBatch(numbers, [self.dataset[index] for index in indices])


def _collated(collate: Callable[[list[Any]], Any], samples: HostBatch) -> HostBatch:
    """Collate the samples of a micro-batch in the process that made them."""
    return HostBatch(samples.indices, collate(samples.batch), samples.data_state)


def seed_forward(seed: int, position: int) -> None:
    """Seed torch, Python and numpy for the forward pass of the micro-batch that starts at `position`."""
    value = mix_seed(seed + _FORWARD, position)
    seed_generators(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(value)


def fetch_step(stream: Stream, position: int, first: int = 0) -> Iterator[tuple[MicroBatch, list[int], list[Any]]]:
    """Yield a step's micro-batches of this rank from the `first` on, their indices and samples, made in this process.

    It seeds the random states as training does. The caller restores them.
    """
    seeded = Seeded(stream.indexed())
    for batch, key in islice(zip(stream.step(position), stream.keys(position, 1), strict=True), first, None):
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
    """Yield the batches of this rank for `steps` steps from `position` on, in the order of `Stream.step`.

    At most one loader process reads an iterable data set, unless positions are cheap.
    """
    keys = partial(stream.keys, position, steps)
    if is_iterable(stream.dataset) and not hasattr(stream.dataset, "by_position"):
        config = replace(config, workers=min(config.workers, 1))
    return iter(Batches(stream.indexed(), keys, config, collate, on_cuda=on_cuda, persistent=False))


class Batches:
    """Batches on the host, loaded according to the loader's options.

    `keys`: called at each iteration; yields for each batch a seed, then the indices of its samples. `collate`: makes a
    batch of samples; None for torch's function. `persistent`: keep the loader processes for the next iteration.
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
            collate_fn=partial(_collated, collate or default_collate),
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


def training_samples(dataset: Dataset[Any]) -> int:
    """Return the number of samples; 0 for an iterable data set. Errors: those of `dataset_length`."""
    return 0 if is_iterable(dataset) else dataset_length(dataset)


def dataset_length(dataset: Dataset[Any], least: int = 1) -> int:
    """Return the number of samples, `least` or more.

    Errors: DataError: the data set is empty, or has no valid length or index.
    """
    if is_iterable(dataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "the data set cannot be indexed",
            expected="a map-style data set with __len__ and __getitem__",
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
