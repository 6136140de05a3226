"""8-bit codes: what a block can hold, and rounding at random."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression import base
from hvdtrain.compression.int8 import Int8, stochastic
from hvdtrain.compression.sizes import BLOCK
from tests.support.compression import bucket, exchange, step
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

SHAPE = bucket(((3, BLOCK),))


@pytest.fixture(params=["in runs", "at once"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test on a CPU's runs of blocks, and on all shards at once as on a GPU."""
    if request.param == "at once":
        monkeypatch.setattr(base, "processes_at_once", lambda device: True)


@pytest.mark.parametrize("size", [1, 2, 3])
@per_rank()
def test_multiples_of_a_scale_arrive_exactly_and_a_large_block_does_not_spoil_its_neighbour(
    comm: ThreadComm, size: int
) -> None:
    codes = torch.arange(3 * BLOCK).remainder(255).sub(127).float().view(3, BLOCK)
    value = codes * torch.tensor([[1.0], [2.0**40], [2.0**-40]])
    torch.testing.assert_close(exchange(Int8(SHAPE, comm), [value]), value.flatten() * size, rtol=1e-6, atol=0)


def test_the_smallest_numbers_are_zero_and_not_nan() -> None:
    out = exchange(Int8(SHAPE, SoloComm()), [torch.full((3, BLOCK), 1e-42)])
    assert out.abs().max() <= 1e-42


@per_rank(2)
def test_rounding_at_random_is_right_in_the_mean(comm: ThreadComm) -> None:
    """A value of 0.3 of a step among larger ones; to the nearest it would never arrive."""
    value = torch.full((3, BLOCK), 0.3)
    value[:, 0] = 126.99
    compressor, nearest = stochastic(SHAPE, comm), Int8(SHAPE, comm)
    outs = torch.stack([step(compressor, [value]) for _ in range(50)]).view(-1, BLOCK)
    assert float(outs[:, 1:].mean()) == pytest.approx(0.6, rel=0.1)
    assert not exchange(nearest, [value]).view(-1, BLOCK)[:, 1:].any()


def test_draws_differ_by_rank_and_step_and_follow_from_what_was_applied() -> None:
    values = [torch.rand(3, BLOCK, generator=torch.Generator().manual_seed(1))]

    def body(comm: ThreadComm) -> torch.Tensor:
        one, other = stochastic(SHAPE, comm), stochastic(SHAPE, comm)
        first = step(one, values, applied=False)
        assert torch.equal(first, step(one, values))
        second = step(one, values)
        assert not torch.equal(first, second)
        step(other, values)
        other.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, 2)
        assert torch.equal(second, step(other, values))
        one.load_state_dict({}, 2)
        assert torch.equal(first, step(one, values))
        return one.work  # fp32 as packed

    on_ranks(2, body)

    def coded(comm: ThreadComm) -> torch.Tensor:
        compressor = Int8(SHAPE, comm, keep_error=True, stochastic=True)
        compressor.pack(0, values[0])
        next(compressor.exchange(torch.zeros(3 * BLOCK)))
        return compressor.work[: 3 * BLOCK].clone()

    assert not torch.equal(*on_ranks(2, coded))


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 0.0), (1 - 2.0**-24, 1 / 127)])
def test_draws_round_down_or_up_and_codes_stay_in_range(
    draw: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least and the largest draw: a third of a code becomes 0 or 1, and the largest codes do not overflow."""
    monkeypatch.setattr(Int8, "_draw", lambda self, use: self._noise.fill_(draw))
    values = torch.full((3, BLOCK), 0.3 / 127)
    values[:, 0], values[:, 1] = 1.0, -1.0
    out = exchange(stochastic(SHAPE, SoloComm()), [values]).view(3, BLOCK)
    torch.testing.assert_close(out[:, :2], values[:, :2], rtol=0.02, atol=0)
    torch.testing.assert_close(out[:, 2:], torch.full((3, BLOCK - 2), expected), rtol=0.02, atol=0)
