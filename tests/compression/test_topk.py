"""The largest elements: which, how many, and how their places are written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.sizes import topk_plan
from hvdtrain.compression.topk import TopK, _nonzero, decode, encode
from tests.support.compression import bucket, exchange
from tests.support.thread_comm import ThreadComm, per_rank


@given(st.integers(1, 3000), st.floats(1e-4, 1), st.integers(0, 3), st.integers(0, 99))
def test_exactly_the_largest_arrive(length: int, share: float, distinct: int, seed: int) -> None:
    """Also where many are equal: as many, of the same magnitudes; each with its own sign and place."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator)
    if distinct:
        values = (values * distinct).round()
    out = exchange(TopK(bucket(((length,),)), SoloComm(), share=share), [values])[:length]
    count = topk_plan(bucket(((length,),)).length, share).count
    expected = values.abs().sort(descending=True).values[:count]
    found = out.abs().sort(descending=True).values
    assert torch.equal(found[:count], expected)
    assert not found[count:].any()
    assert torch.equal(out[out != 0], values[out != 0])


def test_of_equal_magnitudes_the_same_are_chosen_each_time() -> None:
    values = torch.ones(50_000)
    shape = bucket(((50_000,),))
    outs = [exchange(TopK(shape, SoloComm(), share=0.01), [values]) for _ in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert outs[0].count_nonzero() == 500


@given(st.sampled_from(["int16", "int32", "bitmap"]), st.integers(1, 200_000), st.integers(0, 999), st.integers(0, 99))
def test_places_are_read_as_they_were_written(coding: str, length: int, count: int, seed: int) -> None:
    count = min(count, length)
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(seed))[:count].sort().values
    takes = {"int32": 4 * count, "int16": 4 * -(-length // 65536) + 2 * count, "bitmap": -(-length // 8)}
    coded = torch.full((takes[coding],), 0xAA, dtype=torch.uint8)
    encode(coding, chosen, coded, length)
    assert torch.equal(decode(coding, coded, count, length), chosen)


@given(st.lists(st.booleans(), max_size=99))
def test_a_gpu_finds_the_same_flags(flags: list[bool]) -> None:
    made = torch.tensor(flags, dtype=torch.uint8)
    assert _nonzero(made, sum(flags)).tolist() == [place for place, flag in enumerate(flags) if flag]


@pytest.mark.parametrize(
    ("length", "share", "coding"),
    [(1 << 20, 0.01, "int16"), (1 << 20, 1e-6, "int32"), (1 << 20, 0.2, "bitmap"), (40, 0.1, "bitmap")],
)
def test_the_coding_of_fewest_bytes_is_taken(length: int, share: float, coding: str) -> None:
    plan = topk_plan(length, share)
    assert plan.coding == coding
    assert plan.row_bytes - 4 * plan.count <= min(4 * plan.count, length // 8 + 1) + 3


@pytest.mark.parametrize("share", [1e-5, 0.01, 0.2, 1.0])
@per_rank(3)
def test_ranks_may_choose_the_same_and_different_places(comm: ThreadComm, share: float) -> None:
    shape = bucket(((300, 700),))
    values = [torch.randn(300, 700, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    alone = [exchange(TopK(shape, SoloComm(), share=share), [value]) for value in values]
    found = exchange(TopK(shape, comm, share=share), [values[comm.rank]])
    assert torch.equal(found, alone[0] + alone[1] + alone[2])
