"""Rows of parameters are divided among ranks completely, evenly, between the chunks of norms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.compression.sizes import shard_bucket_bytes
from hvdtrain.exchange import norms
from hvdtrain.exchange.norms import norm, squared_norm
from hvdtrain.plan import shards
from hvdtrain.plan.buckets import assign
from hvdtrain.plan.shards import chunk, divide

SHAPES = st.lists(st.lists(st.integers(0, 2000), max_size=3).filter(lambda s: math.prod(s) < 1 << 22), max_size=8)


@given(SHAPES, st.integers(1, 8), st.sampled_from([2, 4, 8]), st.randoms())
def test_every_row_has_one_owner_and_one_place(shapes, ranks, item_bytes, random) -> None:  # type: ignore[no-untyped-def]
    whole = [random.random() < 0.3 for _ in shapes]
    rows, segment = divide(shapes, ranks, item_bytes, whole, 1) if sum(map(math.prod, shapes)) else ([], 0)
    taken = []
    for index, shape in enumerate(shapes):
        own = [each for each in rows if each.index == index]
        ends = [0, *(each.end for each in own)]
        assert [each.begin for each in own] == ends[:-1]
        row = 1 if own and own[0].flat else math.prod(shape[1:])
        assert ends[-1] * row == math.prod(shape)
        assert len(own) <= 1 or not whole[index]
        assert whole[index] or all(each.begin % chunk(shape)[1] == 0 and row == chunk(shape)[0] for each in own)
    sizes = [math.prod(shape) for shape in shapes]
    if not any(whole) and sum(sizes):  # each chunk is in the segment in which its middle would be
        for each in rows:
            row, step = chunk(shapes[each.index])
            for begin in (each.begin, (each.end - 1) // step * step):
                middle = sum(sizes[: each.index]) + (begin + min(begin + step, each.end)) * row // 2
                assert middle * ranks // sum(sizes) == each.rank
    for each in rows:
        length = (each.end - each.begin) * (1 if each.flat else math.prod(shapes[each.index][1:]))
        assert each.rank * segment <= each.start and each.start + length <= (each.rank + 1) * segment
        assert each.start * item_bytes % 64 == 0 and segment * item_bytes % 64 == 0
        taken.append((each.start, each.start + length))
    taken.sort()
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))


def test_segments_are_even() -> None:
    _, segment = divide([(384, 384)] * 30 + [(1024, 384)] * 30 + [(8192, 384)], 4, 4, [False] * 61)
    total = 30 * 384 * 384 + 30 * 1024 * 384 + 8192 * 384
    assert segment < 1.02 * total / 4


LLAMA_70B = [(8192,), (8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (8192,), (28672, 8192), (8192, 28672)]


@pytest.mark.parametrize("ranks", [16, 40, 56, 256, 1000, 4096])
@pytest.mark.parametrize("shapes", [LLAMA_70B * 3, [(256, 4096, 7168)], [(8, 28672, 4096)]], ids=["rows", "V3", "8x7B"])
def test_segments_are_even_among_many_ranks(shapes: list[tuple[int, ...]], ranks: int) -> None:
    """Of three layers of Llama 70B, and of experts in one tensor: DeepSeek-V3's and Mixtral's."""
    rows, segment = divide(shapes, ranks, 4, [False] * len(shapes))
    assert segment * ranks < 1.05 * sum(map(math.prod, shapes))
    assert {each.rank for each in rows} == set(range(ranks))
    assert not any(each.begin % 16 for each in rows if each.flat)


def test_rows_stay_whole_where_their_squares_are_summed() -> None:
    for ranks in (3, 64):
        rows, _ = divide([(8, 300, 256)], ranks, 4, [False], by_rows=True)
        assert not any(each.flat for each in rows) and {each.end - each.begin for each in rows} <= {1, 2, 3}


@pytest.mark.parametrize(
    ("rows", "whole"), [((512, 512, 1024), (True, True, True)), ((1024, 1024), (True, False)), ((1024, 512), (1, 0))]
)
def test_rows_fill_what_whole_matrices_leave(rows: tuple[int, ...], whole: tuple[bool, ...]) -> None:
    _, segment = divide([(count, 512) for count in rows], 2, 4, whole)
    assert segment == 512 * max(1024, sum(rows) // 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_whole_matrices_are_even_over_the_buckets_of_a_model(ranks: int) -> None:
    """Those of 24 layers, in buckets with about a matrix for each rank; between them rows of other parameters."""
    shapes = [(512, 512), (128, 512), (1376, 512), (512, 1376), (3, 100_000)] * 24
    largest = 4 * 512 * 1376
    total = sum(4 * math.prod(shape) for shape in shapes)
    limit = shard_bucket_bytes(
        1 << 20, total, ranks, [(shape, 4 * math.prod(shape)) for shape in shapes if shape[0] > 3]
    )
    assert limit == ranks * largest
    sizes = {str(number): (4 * math.prod(shape), 0) for number, shape in enumerate(shapes)}
    own, padded = [0] * ranks, 0
    for number, bucket in enumerate(assign(sizes, limit, sizes).buckets):
        inside = [shapes[int(name)] for name in bucket]
        rows, segment = divide(inside, ranks, 4, [shape[0] > 3 for shape in inside], number)
        padded += 4 * segment * ranks
        for each in rows:
            if (shape := inside[each.index])[0] > 3:
                own[each.rank] += math.prod(shape) * min(shape)
    assert max(own) < 1.1 * sum(own) / ranks and padded < 1.3 * total


@pytest.mark.parametrize("most", [shards._MOST_CHUNKS, 4], ids=["chunks of 64 Ki", "large chunks"])
def test_a_norm_has_the_same_bits_however_it_is_divided(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are those of the whole gradient."""
    monkeypatch.setattr(shards, "_MOST_CHUNKS", most)
    monkeypatch.setattr(norms, "_sizes_of", norms._sizes)
    for seed in range(5):
        gradient = torch.randn(5000, 300, generator=torch.Generator().manual_seed(seed))
        whole = norm(squared_norm([gradient, torch.ones(3)]))
        _, step = chunk(gradient.shape)
        assert 1 < step < 5000
        first = squared_norm([gradient[:step]], [gradient.shape])
        second = squared_norm([gradient[step:], torch.ones(3)], [gradient.shape, (3,)])
        assert torch.equal(norm(first + second), whole)
        assert torch.equal(squared_norm([gradient.reshape(-1)], [gradient.shape]), squared_norm([gradient]))
        torch.testing.assert_close(whole, torch.linalg.vector_norm(gradient.double()).float(), rtol=4e-6, atol=0)
    assert norm(squared_norm([])) == 0


def test_a_norm_has_the_same_bits_if_long_rows_are_divided() -> None:
    gradient = torch.randn(3, 300, 256, generator=torch.Generator().manual_seed(1))
    rows, _ = divide([gradient.shape], 3, 4, [False])
    assert {each.begin % 65_536 for each in rows} == {0} and {each.begin % 76_800 for each in rows} != {0}
    parts = [squared_norm([each.of(gradient)], [gradient.shape]) for each in rows]
    assert torch.equal(norm(torch.stack(parts).sum()), norm(squared_norm([gradient])))
    torch.testing.assert_close(norm(squared_norm([gradient])), gradient.double().norm().float(), rtol=4e-6, atol=0)
