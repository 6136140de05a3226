"""Every compressor of the table keeps the contract; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.base import Compressor
from hvdtrain.compression.int8 import Int8
from hvdtrain.compression.table import Compression, parse
from tests.support.compression import bucket, check_law, exchange, gradients, residual_sum, step
from tests.support.compression_contract import AS_USED, CLAUSES, named
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

EVERY = pytest.mark.parametrize("compression", AS_USED, ids=named)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@EVERY
def test_solo(compression: Compression, clause: Callable[[Comm, Compression], None]) -> None:
    clause(SoloComm(), compression)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@EVERY
@pytest.mark.some(144)
def test_threads(compression: Compression, clause: Callable[[Comm, Compression], None], size: int) -> None:
    on_ranks(size, lambda comm: clause(comm, compression))


@pytest.mark.parametrize("compression", [*AS_USED, parse("topk:0.2"), parse("topk:1e-5")], ids=named)
def test_an_exchange_does_not_depend_on_what_is_in_the_tensors(
    compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that would make a host wait for a GPU: on the device "meta" there is nothing to read."""
    monkeypatch.setattr(Int8, "_draw", lambda *_: None)  # that device has no generator
    with torch.device("meta"):
        compressor = compression.load()(bucket(((40, 30), (7,), (), (40, 30), (64, 512)), torch.float32), SoloComm())
        out = exchange(compressor, [torch.empty(part.shape) for part in compressor.shape.parts], weight=0.5)
    assert out.device.type == "meta"


_SHAPES = st.lists(st.lists(st.integers(0, 70), max_size=3).map(tuple), max_size=4)


@settings(max_examples=20)
@given(shapes=_SHAPES, size=st.integers(1, 4), exponents=st.lists(st.integers(-6, 3), min_size=4, max_size=4))
@EVERY
@per_rank()
def test_the_law_holds_for_any_shapes(
    comm: ThreadComm, compression: Compression, shapes: list[tuple[int, ...]], size: int, exponents: list[int]
) -> None:
    compressor = compression.load()(bucket(shapes), comm)
    for number in range(2):
        values = gradients(compressor.shape, 10 * comm.rank + number)
        scaled = [v * 10.0**e for v, e in zip(values, exponents, strict=False)]
        check_law(compressor, compression.kind, scaled)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 1)])
@EVERY
def test_another_number_of_ranks_takes_over_the_sum(compression: Compression, before: int, after: int) -> None:
    make = compression.load()
    shape = bucket(((90, 30), (5,), (90, 30)))

    def save(comm: ThreadComm) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        compressor = make(shape, comm)
        step(compressor, gradients(shape, comm.rank))
        compressor.synchronize_state()
        return residual_sum(compressor), compressor.state_dict()

    def load(comm: ThreadComm) -> torch.Tensor:
        compressor: Compressor = make(shape, comm)
        compressor.load_state_dict(state, before)
        return residual_sum(compressor)

    saved, state = on_ranks(before, save)[0]
    for found in on_ranks(after, load):
        torch.testing.assert_close(found, saved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compression", [one for one in AS_USED if one.kind.feedback], ids=named)
@per_rank(2)
def test_a_constant_gradient_arrives_on_average(comm: ThreadComm, compression: Compression) -> None:
    """Error feedback delays but loses nothing: the mean of n steps is off by at most a residual over n."""
    shape = bucket(((90, 30), (5,), (64, 64)))
    compressor, mine = compression.load()(shape, comm), gradients(shape, comm.rank)
    true = sum(torch.cat([v.flatten() for v in gradients(shape, rank)]) for rank in range(comm.size))
    found, errors = torch.zeros(shape.length), []
    for number in range(1, 201):
        found += step(compressor, mine)
        mean = torch.cat([part.view(found).flatten() for part in shape.parts]) / number
        errors.append(float((mean - true).norm() / true.norm()))
    assert errors[199] <= max(0.6 * errors[99], compression.kind.tolerance, 1e-5)
    assert errors[199] < 0.2


def _loss(compression: Compression, size: int) -> float:
    """Of a linear regression after some steps of SGD on `size` ranks: over the variance of the targets."""
    shape = bucket(((32, 24), (24,)))
    generator = torch.Generator().manual_seed(1)
    inputs = 16 * torch.linalg.qr(torch.randn(256, 32, generator=generator)).Q  # orthogonal: all directions alike
    targets = inputs @ torch.randn(32, 24, generator=generator) + torch.randn(24, generator=generator)

    def body(comm: ThreadComm) -> float:
        weight, bias = torch.zeros(32, 24), torch.zeros(24)
        compressor = compression.load()(shape, comm)
        mine = slice(comm.rank, None, comm.size)
        for _ in range(_STEPS):
            error = (inputs[mine] @ weight + bias - targets[mine]) / len(inputs)
            out = step(compressor, [inputs[mine].T @ error, error.sum(0)])
            for place, part in zip((weight, bias), shape.parts, strict=True):
                place.sub_(part.view(out), alpha=_LR)
        return float((inputs @ weight + bias - targets).pow(2).mean() / targets.var())

    losses = on_ranks(size, body)
    assert len(set(losses)) == 1
    return losses[0]


_STEPS, _LR = 500, 0.01
"""Where 1% of a gradient travels at a time, elements wait for 100 steps: the learning rate has to be below 1/100."""


@EVERY
@pytest.mark.some(3)
def test_training_gets_as_far_as_without(compression: Compression) -> None:
    """To a thousandth of the variance of the targets, whatever travels; without compression, to (1 - lr)^(2 steps)."""
    assert _loss(compression, 3) < 1e-3
