"""Low rank: exact cases, the gain of the warm start, batches of matrices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.feedback import Feedback
from hvdtrain.compression.powersgd import PowerSGD, orthonormal
from hvdtrain.compression.sizes import matrix_sides
from hvdtrain.compression.table import parse
from tests.support.compression import bucket, exchange, gradients, parts, step
from tests.support.compression_contract import law
from tests.support.thread_comm import ThreadComm, ThreadHandle, on_ranks, per_rank


def _low_rank(shape: Sequence[int], rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(shape[0], rank, generator=generator), torch.randn(rank, shape[1], generator=generator)
    return left @ right


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(96, 60), (64, 512), (512, 1024), (48, 513)])
@per_rank()
def test_a_sum_of_full_rank_r_arrives_whole(comm: ThreadComm, size: int, shape: tuple[int, int]) -> None:
    """Each rank's matrix is of rank 1, their sum of rank `size`: as many columns hold all of it."""
    made = bucket((shape, (7,), shape))

    def values(rank: int) -> list[torch.Tensor]:
        return [_low_rank(shape, 1, rank), torch.full((7,), 0.1 * rank), _low_rank(shape, 1, rank + 10)]

    compressor = PowerSGD(made, comm, rank=size)
    expected = sum(torch.cat([v.flatten() for v in values(rank)]).double() for rank in range(size))
    found = parts(compressor, exchange(compressor, values(comm.rank)))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@per_rank(2)
def test_warm_start_comes_closer_from_step_to_step(comm: ThreadComm) -> None:
    """To what singular values give, the best of rank r; from its first guess each time it would stay where it is."""
    shape = bucket(((96, 60),))
    value = gradients(shape, 1)[0].contiguous() + 30 * _low_rank((96, 60), 3, 2)
    compressor = PowerSGD(shape, comm, rank=4)
    outs = [parts(compressor, step(compressor, [value])).view(96, 60) / comm.size for _ in range(30)]
    errors = [float((out - value).norm()) for out in outs]
    best = float(torch.linalg.svdvals(value.double())[4:].norm())
    assert all(after <= before * (1 + 1e-4) for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1.02 * best < 1.05 * best < errors[0]


def test_only_a_step_that_is_applied_and_finite_moves_the_start() -> None:
    compressor = PowerSGD(bucket(((96, 60),)), SoloComm(), rank=2)
    (start,) = compressor.state_dict().values()
    before = start.clone()
    step(compressor, gradients(compressor.shape, 1), applied=False)
    step(compressor, [torch.full((96, 60), torch.nan)])
    assert torch.equal(compressor.state_dict()["p0/powersgd_q"], before)
    step(compressor, gradients(compressor.shape, 1))
    assert not torch.equal(compressor.state_dict()["p0/powersgd_q"], before)


def test_a_start_of_another_rank_is_left_aside() -> None:
    """The number in the config was changed before a resume."""
    shape = bucket(((96, 60),))
    two, four, new = (PowerSGD(shape, SoloComm(), rank=rank) for rank in (2, 4, 4))
    step(two, gradients(shape, 1))
    four.load_state_dict(two.state_dict(), 1)
    assert torch.equal(step(four, gradients(shape, 2)), step(new, gradients(shape, 2)))


def test_a_matrix_of_zeros_comes_back() -> None:
    """A factor of zeros spans nothing: whatever came after would be lost for good."""
    compressor = Feedback(PowerSGD(bucket(((96, 60),)), SoloComm(), rank=2, keep_error=True))
    for _ in range(3):
        assert not step(compressor, [torch.zeros(96, 60)]).any()
    value = _low_rank((96, 60), 2, 1)
    total = sum(step(compressor, [value]) for _ in range(4))
    torch.testing.assert_close(total, 4 * value.flatten(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("magnitude", [1e-18, 1e12])
def test_magnitudes_do_not_matter(magnitude: float) -> None:
    """Factors are of the square of a gradient's magnitude, unless they are made orthonormal in between."""
    compressor = PowerSGD(bucket(((96, 60),)), SoloComm(), rank=2)
    value = _low_rank((96, 60), 2, 1) * magnitude
    for _ in range(3):
        out = step(compressor, [value]).view(96, 60)
        torch.testing.assert_close(out / magnitude, value / magnitude, rtol=1e-3, atol=1e-4)


def test_matrices_of_one_shape_do_not_see_each_other() -> None:
    """Bitwise: one of them a million times larger, another zero."""
    alone = exchange(PowerSGD(bucket(((96, 40),)), SoloComm(), rank=2), [_low_rank((96, 40), 5, 1)])
    three = bucket(((96, 40),) * 3)
    values = [_low_rank((96, 40), 5, 1), _low_rank((96, 40), 5, 2) * 1e6, torch.zeros(96, 40)]
    together = exchange(PowerSGD(three, SoloComm(), rank=2), values)
    torch.testing.assert_close(three.parts[0].view(together), alone.view(96, 40), rtol=1e-4, atol=1e-5)
    assert not three.parts[2].view(together).any()


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e12])
def test_factors_get_orthonormal_however_ill_conditioned(condition: float) -> None:
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn(3, 500, 4, generator=generator)
    columns[..., 1:] = columns[..., :1] + columns[..., 1:] / condition
    found = orthonormal(columns)
    torch.testing.assert_close(found @ found.mT, torch.eye(4).expand(3, 4, 4), rtol=0, atol=2e-6)
    if condition < 1e6:  # beyond that columns themselves are not told apart in fp32
        torch.testing.assert_close(columns.mT @ found.mT @ found, columns.mT, rtol=1e-4, atol=1e-4)


@settings(max_examples=40)
@given(st.lists(st.sampled_from([(20, 16), (3,), (16, 512), (5, 7)]), min_size=1, max_size=9))
def test_matrices_of_low_rank_arrive_whole_wherever_they_lie(shapes: list[tuple[int, ...]]) -> None:
    """And nothing is added to what lies between them."""
    made = bucket(shapes)
    values = [_low_rank(each, 2, n) if len(each) > 1 else torch.full(each, n + 0.5) for n, each in enumerate(shapes)]
    compressor = PowerSGD(made, SoloComm(), rank=2)
    for _ in range(2):
        out = parts(compressor, step(compressor, values))
        torch.testing.assert_close(out, torch.cat([v.double().flatten() for v in values]), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "rank", "sides"),
    [
        ((96, 40), 14, (96, 40)),
        ((96, 40), 15, None),  # 2 * 15 * 136 > 96 * 40: the factors take more than half
        ((40, 8, 3, 3), 2, (40, 72)),
        ((8, 512, 256), 4, (4096, 256)),  # the experts of a layer
        ((4000,), 1, None),
        ((), 1, None),
        ((4000, 1), 1, None),
        ((0, 5), 1, None),
    ],
)
def test_what_is_no_saving_is_sent_as_it_is(shape: tuple[int, ...], rank: int, sides: tuple[int, int] | None) -> None:
    assert matrix_sides(shape, rank) == sides


class AtOnce(ThreadComm):
    """Its sums are there as soon as they are asked for, as an exchange that is quick may have them."""

    def allreduce(self, tensor: torch.Tensor, *, name: str) -> ThreadHandle:
        handle = super().allreduce(tensor, name=name)
        handle.wait()
        return handle


def test_what_is_sent_is_not_read_again_as_ones_own() -> None:
    on_ranks(2, lambda comm: law(AtOnce(comm._hub, comm.rank), parse("powersgd:2")))
