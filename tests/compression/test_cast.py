"""fp16 and bfloat16 on the way: range, overflow, recovery."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.base import Compressor, Figures, commit_all, is_finite
from hvdtrain.compression.cast import Bf16, Fp16, Fp16ByOwners, fp16
from tests.support.compression import Counting, bucket, exchange, step
from tests.support.thread_comm import ThreadComm, per_rank

SHAPE = bucket(((3,),))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@per_rank()
def test_what_each_rank_can_send_can_be_summed(comm: ThreadComm, size: int) -> None:
    """fp16 ends at 65504; to multiply by a power of two rounds nothing."""
    value = torch.tensor([61440.0, -61440.0, 2.0**-10])
    assert torch.equal(exchange(Fp16(SHAPE, comm), [value])[:3], value * size)


@pytest.mark.parametrize("kind", [Fp16, Fp16ByOwners])
@per_rank(2)
def test_an_overflow_on_one_rank_shrinks_the_scale_of_all_until_it_fits(comm: ThreadComm, kind: type[Fp16]) -> None:
    compressor = kind(SHAPE, comm)
    large = torch.full((3,), 1e6 if comm.rank else 1.0)
    first = compressor.scale
    out = step(compressor, [large], applied=False)
    assert not torch.isfinite(out[:3]).any()
    assert compressor.scale < first
    torch.testing.assert_close(step(compressor, [large])[:3], torch.full((3,), 1e6 + 1.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("value", [1e-6, 1.0, 1e6, 1e9])
@per_rank()
def test_the_scale_follows_the_gradients(comm: ThreadComm, value: float, size: int) -> None:
    """A plain cast loses values below 6e-8, and turns values above 65504 into inf."""
    mine = torch.tensor([value, -value / 1000, 0.0])
    compressor = Fp16(SHAPE, comm)
    for _ in range(12):
        out = step(compressor, [mine])
    torch.testing.assert_close(out[:3], mine * size, rtol=1e-3, atol=0)


@per_rank(2)
def test_finite_gradients_in_fp16_are_finite_though_their_sum_in_fp16_is_not(comm: ThreadComm) -> None:
    compressor = Fp16(bucket(((3000,),), torch.float16), comm)
    mine = torch.full((3000,), 100.0, dtype=torch.float16)
    for _ in range(2):
        out = exchange(compressor, [mine])
        assert is_finite(*Figures([compressor]).read())
        commit_all([compressor], applied=True)
        torch.testing.assert_close(out[:3000], 2 * mine)


def test_it_looks_again_after_some_steps_that_are_applied() -> None:
    compressor = Fp16(SHAPE, SoloComm())
    step(compressor, [torch.ones(3)])
    at_one = compressor.scale
    for _ in range(40):
        step(compressor, [torch.full((3,), 1e-3)], applied=False)
    assert compressor.scale == at_one
    scales = [compressor.scale for _ in range(20) if step(compressor, [torch.full((3,), 1e-9)]) is not None]
    assert scales[0] == at_one and scales[-1] > 1e6


def test_nan_now_and_then_costs_nothing_afterwards() -> None:
    """That it is no overflow is not known; the next sum says what fits."""
    compressor = Fp16(SHAPE, SoloComm())
    for _ in range(100):
        for _ in range(20):
            step(compressor, [torch.full((3,), torch.nan)], applied=False)
        step(compressor, [torch.full((3,), 1.0)])
        assert step(compressor, [torch.full((3,), 1e-3)])[0] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_bfloat16_never_travels_as_fp16(dtype: torch.dtype) -> None:
    counting = Counting(SoloComm())
    compressor = fp16(bucket(((64,),), dtype), counting)  # type: ignore[arg-type]
    assert isinstance(compressor, Bf16) == (dtype == torch.bfloat16)
    large = 1e30 if dtype == torch.bfloat16 else 1e3
    out = exchange(compressor, [torch.full((64,), large, dtype=dtype)])
    torch.testing.assert_close(out, torch.full((64,), large, dtype=dtype), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("kind", "large"), [(Bf16, 256.0), (Fp16ByOwners, 2048.0)])
@per_rank(3)
def test_owners_sum_in_fp32(comm: ThreadComm, kind: type[Compressor], large: float) -> None:
    """In 16 bits, large + 1 is large; large + 1 + 1 is large + 2 where partial sums are not rounded."""
    value = torch.full((3,), large if comm.rank == 0 else 1.0)
    assert exchange(kind(SHAPE, comm), [value])[0] == large + 2
