"""What reaches the ranks is a function of position: any size, workers or none, from any point on."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.loader import Stream, dataset_length, seed_forward, train_batches
from hvdtrain.data.mixture import Mixture, sample_order
from hvdtrain.errors import DataError
from tests.data.test_iterable import draw, equal


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i, and what torch, random and numpy draw while it is made."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_any_number_of_ranks_gives_the_same_batches(size: int) -> None:
    one = draw(Numbers(23), 1)[0]
    assert equal(one, draw(Numbers(23), size)[0]) and {len(step) for step in one} == {4}


def test_any_position_to_go_on_from_gives_the_same_batches() -> None:
    assert equal(draw(Numbers(23), 2)[0][3:], draw(Numbers(23), 2, position=30, steps=3)[0])


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
def test_worker_processes_give_the_same_batches_each_with_its_indices() -> None:
    stream = Stream(Numbers(23), 3, 10, 3, 0, 2)
    plain, worked = (
        list(train_batches(stream, 0, 5, LoaderConfig(workers=workers), None, on_cuda=False)) for workers in (0, 2)
    )
    for alone, made in zip(plain, worked, strict=True):
        assert torch.equal(alone.batch, made.batch) and alone.indices == made.indices
        assert np.frombuffer(made.indices, np.int64).tolist() == [int(row[0]) for row in made.batch]


def test_law_4_every_sample_once_an_epoch() -> None:
    """Law 4: over 23 steps of 10, which are 10 epochs of 23, each sample comes 10 times; in order, once an epoch."""
    seen = [int(row[0]) for step in draw(Numbers(23), 3, steps=23)[0] for batch in step for row in batch]
    assert Counter(seen) == Counter(dict.fromkeys(range(23), 10))
    for epoch in range(10):
        assert sorted(seen[23 * epoch : 23 * (epoch + 1)]) == list(range(23))


@given(
    st.sampled_from([Numbers(23), Mixture([Numbers(20), Numbers(3)], [0.4, 0.6])]),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=4),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_skipped_positions_are_skipped_at_any_world_size(
    dataset: Any, position: int, holes: list[tuple[int, int]], global_batch: int, micro_batch: int, size: int
) -> None:
    left_out: list[list[int]] = []
    for begin, length in sorted(holes):
        if not left_out or begin >= left_out[-1][1]:
            left_out.append([begin, begin + length])
    free = (p for p in itertools.count(position) if not any(b <= p < e for b, e in left_out))
    ranks = [Stream(dataset, 3, global_batch, micro_batch, rank, size, left_out) for rank in range(size)]
    keys, steps = [stream.keys(position, 4) for stream in ranks], [stream.steps(position, 4) for stream in ranks]
    for _ in range(4):
        wanted = list(itertools.islice(free, global_batch))
        shares = [next(each) for each in steps]
        assert [share.batches for share in shares] == [stream.step(position) for stream in ranks]
        batches = [batch for share in shares for batch in share.batches]
        assert [p for batch in batches for p in range(batch.start, batch.stop)] == wanted
        pairs = zip(keys, ranks, strict=True)
        drawn = [i for key, stream in pairs for _ in stream.step(position) for i in next(key)[1:]]
        assert drawn == sample_order(dataset, 23, 3).indices(np.array(wanted)).tolist()
        position = ranks[0].position_after(position)
        assert {position, *(share.end for share in shares)} == {wanted[-1] + 1}


def test_forward_seed_depends_on_seed_and_position() -> None:
    draws = []
    for seed, position in ((0, 0), (0, 4), (1, 0), (0, 0)):
        seed_forward(seed, position)
        draws.append(torch.tensor([*torch.rand(4), random.random(), np.random.random()]))
    assert torch.equal(draws[0], draws[3])
    assert not (draws[0] == draws[1]).any()
    assert not (draws[0] == draws[2]).any()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(("dataset", "words"), [(Numbers(0), "empty"), (Endless(), "cannot be indexed")])
def test_data_that_cannot_serve(dataset: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        dataset_length(dataset)
