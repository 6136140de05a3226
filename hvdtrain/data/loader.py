"""The micro-batches of a rank, in order, from any position on: torch's DataLoader over `order`."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.order import MicroBatch, micro_batches, mix, passing_over, samples, share
from hvdtrain.errors import DataError

_SAMPLE, _FORWARD = 1, 2
"""What a random state is for: making the samples of a micro-batch, or its forward pass."""

_MOMENT_S = 5.0
"""From when a connection to a loader process breaks until that has ended."""

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
    pin_memory: bool,
) -> Iterator[Drawn]:
    """Batches of this rank on the host, from `position` on for `steps` steps, in the order of `Stream.step`."""
    loader: DataLoader[Any] = DataLoader(
        Seeded(stream.dataset),
        batch_sampler=_Once(stream.keys(position, steps)),
        collate_fn=_Collated(collate or default_collate),
        num_workers=config.workers,
        prefetch_factor=config.prefetch if config.workers else None,
        # MPI's and Horovod's threads are running: a plain fork could inherit a lock that nobody will release.
        multiprocessing_context="forkserver" if config.workers else None,
        worker_init_fn=_end_with_rank,
        pin_memory=pin_memory,
    )
    if not config.workers:
        return iter(loader)
    with _signals_blocked():
        batches = iter(loader)
    processes: list[BaseProcess] = batches._workers  # type: ignore[attr-defined]
    _processes.update(processes)
    return _naming_lost_processes(batches, processes)


_processes: WeakSet[BaseProcess] = WeakSet()


def _kill_processes() -> None:
    """Before the interpreter ends: multiprocessing ends them by SIGTERM, which they do not hear, and waits for them."""
    for process in _processes:
        process.kill()


atexit.register(_kill_processes)


def _naming_lost_processes(batches: Iterator[Drawn], processes: Sequence[BaseProcess]) -> Iterator[Drawn]:
    """The batches.

    Errors:
        DataError: a loader process has ended; torch's own error says of it what broke last, such as a connection.
    """
    while True:
        try:
            drawn = next(batches)
        except StopIteration:
            return
        except Exception as error:
            ended = [] if str(error).startswith("Caught ") else _exit_codes(processes)  # an exception of the data set's
            if not ended:
                raise
            raise DataError(
                "a loader process has ended amid its work",
                expected="samples, or an exception",
                found=", ".join(map(_said, ended)),
                next_step="--loader.workers 0 makes samples in the rank itself, where it shows what ends them",
            ) from error
        yield drawn


def _exit_codes(processes: Sequence[BaseProcess]) -> list[int]:
    """Of those that have ended, or do so within a moment."""
    deadline = time.monotonic() + _MOMENT_S
    while not (found := [p.exitcode for p in processes if p.exitcode is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _said(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    hint = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let processes started within never see the signals that mean a rank to save or to stop.

    mpirun, a scheduler and a terminal send them to all processes of a group; a loader process would die of them.
    """
    notices = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    try:
        # Its start unblocks two of them (resource_tracker.py), so it comes first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, notices)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_rank(_worker: int) -> None:
    """In a loader process: see to it that it ends when its rank is gone, by SIGKILL too.

    torch's own watch is for the process that forked it: the fork server, which lives as long as what it has forked.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Once:
    """A batch sampler of lists that can be read one time."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


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
    length = len(dataset)
    if length < least:
        raise DataError("the data set is empty", expected="one sample or more", found=f"{type(dataset).__name__} of 0")
    return length
