"""fp16 and bfloat16 on the way: range, overflow, recovery."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.cast import Bf16, Fp16, fp16
from tests.support.compression import Counting, bucket, exchange, step
from tests.support.thread_comm import ThreadComm, on_ranks

SHAPE = bucket(((3,),))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_each_rank_can_send_can_be_summed(size: int) -> None:
    """fp16 ends at 65504; to multiply by a power of two rounds nothing."""
    value = torch.tensor([61440.0, -61440.0, 2.0**-10])

    def body(comm: ThreadComm) -> None:
        assert torch.equal(exchange(Fp16(SHAPE, comm), [value])[:3], value * size)

    on_ranks(size, body)


def test_an_overflow_on_one_rank_shrinks_the_scale_of_all_until_it_has_not_come_again() -> None:
    def body(comm: ThreadComm) -> None:
        compressor = Fp16(SHAPE, comm)
        first = compressor.scale
        large = torch.full((3,), 1e6 if comm.rank else 1.0)
        out = step(compressor, [large], applied=False)
        assert not torch.isfinite(out[:3]).any()
        assert compressor.scale < first
        torch.testing.assert_close(step(compressor, [large])[:3], torch.full((3,), 1e6 + 1.0), rtol=1e-3, atol=0)
        scales = {compressor.scale}
        for _ in range(400):
            step(compressor, [torch.ones(3)])
            scales.add(compressor.scale)
        assert compressor.scale == first
        assert len(scales) > 3, "back at once"

    on_ranks(2, body)


def test_skipped_steps_do_not_bring_the_scale_back() -> None:
    compressor = Fp16(SHAPE, SoloComm())
    step(compressor, [torch.full((3,), 1e6)], applied=False)
    after = compressor.scale
    for _ in range(400):
        step(compressor, [torch.ones(3)], applied=False)
    assert compressor.scale == after


def test_nan_without_end_leaves_something_of_a_gradient() -> None:
    compressor = Fp16(SHAPE, SoloComm())
    for _ in range(100):
        step(compressor, [torch.full((3,), torch.nan)], applied=False)
    assert compressor.scale > 0
    for _ in range(40 * 60):
        step(compressor, [torch.ones(3)])
    assert exchange(compressor, [torch.ones(3)])[0] == 1


def test_the_scale_is_kept_with_the_parameters() -> None:
    one, other = Fp16(SHAPE, SoloComm()), Fp16(SHAPE, SoloComm())
    step(one, [torch.full((3,), 1e6)], applied=False)
    other.load_state_dict(one.state_dict(), 1)
    assert other.scale == one.scale < 1
    other.load_state_dict({}, 1)
    assert other.scale == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_bfloat16_never_travels_as_fp16(dtype: torch.dtype) -> None:
    counting = Counting(SoloComm())
    compressor = fp16(bucket(((64,),), dtype), counting)  # type: ignore[arg-type]
    assert isinstance(compressor, Bf16) == (dtype == torch.bfloat16)
    large = 1e30 if dtype == torch.bfloat16 else 1e3
    out = exchange(compressor, [torch.full((64,), large, dtype=dtype)])
    torch.testing.assert_close(out, torch.full((64,), large, dtype=dtype), rtol=1e-2, atol=0)


def test_bfloat16_is_summed_in_fp32() -> None:
    """256 + 1 is 256 in bfloat16; 256 + 1 + 1 is 258 where partial sums are not rounded."""

    def body(comm: ThreadComm) -> float:
        value = torch.full((3,), 256.0 if comm.rank == 0 else 1.0)
        return float(exchange(Bf16(SHAPE, comm), [value])[0])

    assert on_ranks(3, body) == [258.0] * 3
