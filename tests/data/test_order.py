"""Law 4's foundation: an epoch is a permutation, and no position depends on the number of ranks."""

from __future__ import annotations

from itertools import accumulate
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data.order import MicroBatch, _splitmix, micro_batches, mix_seed, sample_indices


@given(st.integers(1, 400), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_every_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * length, (epoch + 1) * length)
    assert sorted(sample_indices(positions, length, seed)) == list(range(length))


@given(st.integers(1, 10**9), st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_a_position_alone_decides(length: int, seed: int, positions: list[int]) -> None:
    together = sample_indices(np.array(positions), length, seed)
    alone = [int(sample_indices(np.array([p]), length, seed)[0]) for p in positions]
    assert together.tolist() == alone
    assert all(0 <= index < length for index in alone)


def test_epochs_and_seeds_differ_and_look_random() -> None:
    length = 20_000
    first = sample_indices(np.arange(length), length, 0)
    second = sample_indices(np.arange(length, 2 * length), length, 0)
    other = sample_indices(np.arange(length), length, 1)
    orders = [first, second, other, np.arange(length)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            # Of two unrelated permutations about one element stays in place; correlation is about 1 / sqrt(length).
            assert (a == b).sum() < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(length)
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 4 / np.sqrt(length)


RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 200)), min_size=1, max_size=4)


@given(RANGES, st.integers(1, 200), st.integers(1, 70))
def test_ranks_share_out_a_global_batch(gaps: list[tuple[int, int]], micro_batch: int, size: int) -> None:
    ends = list(accumulate(gap + length for gap, length in gaps))
    ranges = [(end - length, end) for end, (_, length) in zip(ends, gaps, strict=True)]
    whole = micro_batches(ranges, micro_batch, 0, 1)
    shares = [micro_batches(ranges, micro_batch, rank, size) for rank in range(size)]
    assert [batch for share in shares for batch in share] == whole
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(shares[0]) == max(map(len, shares)), "who records works as much as any"
    assert [p for batch in whole for p in range(batch.start, batch.stop)] == [p for r in ranges for p in range(*r)]
    assert all(batch.stop - batch.start <= micro_batch for batch in whole)


def test_a_rank_makes_only_its_own_micro_batches() -> None:
    with patch("hvdtrain.data.order.MicroBatch", wraps=MicroBatch) as made:
        assert len(micro_batches([(0, 1 << 20)], 1, 7, 1 << 18)) == made.call_count == 4


@given(st.integers(0, 2**64 - 1))
def test_numbers_mix_as_arrays_do(value: int) -> None:
    assert int(_splitmix(np.array([value], dtype=np.uint64))[0]) == _splitmix(value)


def test_mix_spreads() -> None:
    values = [mix_seed(seed, value) for seed in range(50) for value in range(50)]
    assert len(set(values)) == len(values)
    assert all(0 <= v < 2**63 for v in values)
    ones = np.mean([bin(v).count("1") for v in values])
    assert abs(ones - 31.5) < 0.5
