"""Iterable data sets: the same samples on any number of ranks and in a resume, with and without their own state."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.iterable import IterableSamples, sample_hash
from hvdtrain.data.loader import HostBatch, Stream, fetch_step, train_batches
from hvdtrain.errors import ConfigError, DataError, LaunchError
from hvdtrain.task.base import Task
from hvdtrain.verify.data import to_text, verify_data
from tests.support.gallery import record_on_threads
from tests.support.thread_job import train_on_threads
from tests.support.toy import Noisy, toy

MADE: list[int] = []
"""The samples that were made."""


class Plain(IterableDataset[Any]):
    """Passes of 7, 8, 9, ... samples in random order: number, pass, and what torch, random and numpy draw."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(7 + self.epoch).tolist():
            MADE.append(index)
            drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
            yield torch.tensor([index, self.epoch, *drawn], dtype=torch.float64)


class Saved(Plain):
    """Its order depends on the pass only, and its state is the number of samples that were read of it."""

    begin = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["read"]

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.epoch).permutation(7 + self.epoch)
        for index in order[self.begin :].tolist():
            MADE.append(index)
            self.begin += 1
            yield torch.tensor([index, self.epoch, torch.rand(()).item()], dtype=torch.float64)


class Eager(Plain):
    """It draws its order when a pass is opened, not when the first sample is read."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(7 + self.epoch).tolist()
        return iter([torch.tensor([index, self.epoch], dtype=torch.float64) for index in order])


class Divided(Plain):
    """It reads less in the second loader process, and draws otherwise in the first."""

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None
        return super().__iter__()


class Wrong(Saved):
    """Its state leads to the pass's first sample again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def draw(dataset: Any, size: int, *, position: int = 0, steps: int = 6, state: Any = None, workers: int = 0) -> Any:
    """The micro-batches of each step, those of all ranks in order; and for each step the first one of each rank."""
    by_step: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    firsts: list[list[HostBatch]] = [[] for _ in range(steps)]
    for rank in range(size):
        stream = Stream(dataset, 3, 10, 3, rank, size, data_state=state or {})
        batches = train_batches(stream, position, steps, LoaderConfig(workers=workers), None, on_cuda=False)
        for step in range(steps):
            drawn = [next(batches) for _ in stream.step(position + 10 * step)]
            by_step[step] += [batch.batch for batch in drawn]
            firsts[step] += drawn[:1]
        assert next(batches, None) is None
    return by_step, firsts


def equal(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    pairs = zip(itertools.chain(*some), itertools.chain(*others), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", [Plain, Saved, Eager])
def test_any_number_of_ranks_gives_the_same_batches(kind: Any) -> None:
    one, _ = draw(kind(), 1)
    assert all(equal(one, draw(kind(), size)[0]) for size in (2, 3, 5))
    rows = torch.cat(list(itertools.chain(*one)))
    passes = [rows[rows[:, 1] == epoch][:, 0].tolist() for epoch in range(6)]
    assert [sorted(found) for found in passes] == [list(range(7 + epoch)) for epoch in range(6)]
    assert passes[5] != sorted(passes[5]) and len(rows) == 60


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.slow
def test_one_loader_process_reads() -> None:
    assert equal(draw(Divided(), 1, steps=3)[0], draw(Divided(), 1, steps=3, workers=3)[0])


@pytest.mark.parametrize("kind", [Plain, Saved])
@pytest.mark.parametrize("taken", [0, 2, 3])
def test_a_resume_reads_the_same_samples(kind: Any, taken: int) -> None:
    """From the state of any rank's first micro-batch of a step: on at that step, or at the next one."""
    whole, firsts = draw(kind(), 3)
    for first, ahead in itertools.product(firsts[taken], (0, 1)):
        state, position = orjson.loads(first.data_state), 10 * (taken + ahead)
        again, _ = draw(kind(), 2, position=position, steps=6 - taken - ahead, state=state)
        assert equal(whole[taken + ahead :], again)


def test_a_state_saves_reading() -> None:
    """Without a state, a resume reads the pass from its beginning; with one, from a place before the position."""
    for kind, least in ((Plain, 10), (Saved, 3)):
        _, firsts = draw(kind(), 1)
        state = orjson.loads(firsts[3][0].data_state)
        assert state["position"] == 30 and state["begin"] == 24
        MADE.clear()
        _, again = draw(kind(), 1, position=30, steps=1, state=state)
        assert orjson.loads(again[0][0].data_state)["position"] <= 30  # so that a repeated step can begin there
        assert len(MADE) == least + (6 if kind is Plain else 7)  # 30 to 39, of two passes


@pytest.mark.filterwarnings("error")
def test_a_state_that_leads_elsewhere_is_not_used() -> None:
    whole, firsts = draw(Wrong(), 1)
    state = orjson.loads(firsts[3][0].data_state)
    with pytest.warns(UserWarning, match="leads to other samples than before"):
        again, _ = draw(Wrong(), 1, position=30, steps=3, state=state)
    assert equal(whole[3:], again)
    second = Stream(Wrong(), 3, 10, 3, 1, 2, data_state=state)  # only rank 0 warns
    assert all(torch.equal(a, b) for (_, _, [a, *_]), b in zip(fetch_step(second, 30), [whole[3][2][0]], strict=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning", "ignore:the data set's state_dict:UserWarning")
def test_iterable_data_sets_of_datasets() -> None:
    """Its shuffling buffer is not in its state; a loader process would read it in another order."""
    rows = pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(25))}).to_iterable_dataset(num_shards=3)

    def numbers(size: int, **options: Any) -> Any:
        by_step, firsts = draw(rows.shuffle(seed=3, buffer_size=8), size, **options)
        return [[batch["x"].tolist() for batch in step] for step in by_step], firsts

    whole, firsts = numbers(1)
    assert numbers(3)[0] == numbers(2, workers=1)[0] == whole
    for step in range(1, 6):
        state = orjson.loads(firsts[step][0].data_state)
        assert numbers(2, position=10 * step, steps=6 - step, state=state)[0] == whole[step:]


def test_earlier_positions_are_read_again() -> None:
    samples = IterableSamples(Plain(), 4, 2, {})
    rows = [samples[position] for position in range(12)]
    MADE.clear()
    assert torch.equal(samples[11], rows[11]) and torch.equal(samples[10], rows[10]) and not MADE
    assert torch.equal(samples[9], rows[9]) and torch.equal(samples[3], rows[3])
    assert torch.equal(samples[30], draw(Plain(), 1)[0][3][0][0])
    resumed = IterableSamples(Plain(), 4, 2, {"epoch": 1, "begin": 7, "position": 9})
    assert torch.equal(resumed[9], rows[9]) and torch.equal(resumed[3], rows[3])


def test_a_second_reader_does_not_disturb_the_first() -> None:
    dataset = Saved()
    readers = [IterableSamples(dataset, 3, 1, {}) for _ in range(2)]
    for position in range(20):
        assert torch.equal(*(reader[position] for reader in readers))
        readers[0].note_place()
        assert orjson.loads(readers[0].state())["position"] == position + 1


def test_equal_repeated_micro_batches() -> None:
    """Ranks that draw again for weight zero read forwards only."""
    for rank in range(3):
        stream = Stream(Plain(), 3, 10, 3, rank, 3, uniform=True)
        batches = list(train_batches(stream, 0, 2, LoaderConfig(), None, on_cuda=False))
        assert len(batches) == 4
        again = [torch.equal(batches[step].batch, batches[step + 1].batch) for step in (0, 2)]
        assert again == [rank > 0, rank > 0]


class Once(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return 0


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Odd(Saved):
    def state_dict(self) -> Any:
        return {"read": {1, 2}}


@pytest.mark.parametrize(
    ("dataset", "words"), [(Once(), "only once"), (Empty(), "is empty"), (Odd(), "cannot be saved")]
)
def test_data_that_cannot_serve(dataset: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        draw(dataset, 1)


def test_hashes_of_samples() -> None:
    samples: list[Any] = [
        *(1, 1.5, "1", b"1", None, [1, 2], {"a": 1}, {"a": 2}, np.zeros(3), np.ones(3), Plain()),
        *(torch.ones(3), torch.ones(()), torch.ones(3, dtype=torch.bfloat16), (torch.ones(3), 0)),
    ]
    hashes = [sample_hash(sample) for sample in samples]
    assert hashes == [sample_hash(sample) for sample in samples]
    assert len({*hashes}) == len(samples) - 1, "a dict's values count, not its keys; 1 and {'a': 1} are alike"


class Rows(IterableDataset[Any]):
    """Passes of 11 samples over a map-style data set, in another order each time."""

    def __init__(self, rank: int = 0) -> None:
        self.data, self.rank = Noisy(11 + rank), rank

    def __iter__(self) -> Iterator[Any]:
        yield from (self.data[index] for index in torch.randperm(len(self.data)).tolist())


def _build(rank: int) -> Task:
    return replace(toy(), train_data=Rows())


def test_laws_1_and_2(tmp_path: Path) -> None:
    """The losses are equal on 1, 2 and 3 ranks, and after a resume on another number of ranks."""
    options = ["--train.steps=12", "--train.global_batch=8", "--train.micro_batch=2", "--checkpoint.every=5"]
    one, *others = (record_on_threads(tmp_path / str(n), *options, size=n, build=_build) for n in (1, 2, 3))
    for size, stop in ((2, 7), (3, 12)):
        resumed = record_on_threads(tmp_path, *options, f"--train.stop_at={stop}", size=size, build=_build)
    assert len(one.losses()) == 12
    for job in (*others, resumed):
        assert job.losses() == pytest.approx(one.losses(), rel=1e-5)
    progress = orjson.loads((resumed.run / "checkpoints/step-000010/state.json").read_bytes())["progress"]
    assert (progress["position"], progress["data_state"]) == (80, {"epoch": 6, "begin": 66, "position": 68})
    report = verify_data(resumed.run)
    assert not report.wrong and report.epochs.iterable == 96
    assert "96 samples of an iterable data set, each position once" in to_text(report, resumed.run)


def test_what_an_iterable_data_set_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--train\.epochs cannot be used with an iterable data set"):
        train_on_threads("--train.epochs=1", f"--run_dir={tmp_path}/run", size=1, build=_build)

    def differing(rank: int) -> Task:
        return replace(toy(), train_data=Rows(rank))

    with pytest.raises(LaunchError, match="the data of rank 1 differs"):
        train_on_threads("--train.steps=1", f"--run_dir={tmp_path}/run", size=2, build=differing)
