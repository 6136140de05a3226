"""The engine ddp: frozen parameters, compression, skipped steps, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.engine.base import Engine
from hvdtrain.engine.ddp import DdpSums
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import TaskError
from hvdtrain.plan.plan import Plan
from tests.support.toy import Net

pytestmark = pytest.mark.usefixtures("several_ranks")


@pytest.fixture
def model() -> Net:
    torch.manual_seed(3)
    return Net(16, 0.0)


def _engine(model: nn.Module, job: Comm, compression: str = "none", bucket_mib: float | None = None) -> Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = make_engine(optimizer, model, job, Plan("ddp", compression, bucket_mib=bucket_mib))
    assert isinstance(engine.sums, DdpSums)
    return engine


def _batch(rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def _step(engine: Engine, model: nn.Module, job: Comm, scale: float = 1.0) -> dict[str, Tensor]:
    engine.begin(1)
    loss, _ = engine.forward(lambda: (model(_batch(job.rank)).square().sum() * scale, 4.0))
    engine.backward(loss)
    engine.finish()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _sums(model: nn.Module, job: Comm) -> dict[str, Tensor]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    loss = sum((model(_batch(rank)).square().sum() for rank in range(job.size)), torch.zeros(()))
    found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named, found, strict=True)}


def _near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("bucket_mib", [None, 1e-4])
def test_sums_of_parameters_that_are_frozen_and_freed_in_training(
    model: Net, job: Comm, bucket_mib: float | None
) -> None:
    """Whatever the size of buckets; the model's state keeps its names."""
    names = list(model.state_dict())
    engine = _engine(model, job, bucket_mib=bucket_mib)
    for is_trained in (True, False, True):
        model.layers[0].requires_grad_(is_trained)
        for _ in range(2):
            _near(_step(engine, model, job), _sums(model, job))
    assert list(model.state_dict()) == names
    engine.close()


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 1e-2), ("bf16", 5e-2)])
def test_casts_stay_near(compression: str, tolerance: float, model: Net, job: Comm) -> None:
    engine = _engine(model, job, compression)
    found, expected = _step(engine, model, job), _sums(model, job)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert all(float((found[name] - g).abs().max()) <= tolerance * largest for name, g in expected.items())
    assert any(not torch.equal(found[name], g) for name, g in expected.items()), "nothing was compressed"
    engine.close()


@pytest.mark.parametrize("bucket_mib", [None, 1e-4])
def test_powersgd_loses_nothing_over_steps_and_a_skipped_step_leaves_no_trace(
    job: Comm, bucket_mib: float | None
) -> None:
    """What was received in all steps, and what is kept for the next one, add up to all gradients.

    On CPUs there is one bucket, whatever the size: with several, Gloo's threads would wait for each other.
    """
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
    engine = _engine(model, job, "powersgd:1", bucket_mib)
    received: dict[str, Tensor] = {}
    skipped, steps = 4, 8
    for step in range(steps):
        found = _step(engine, model, job, scale=float("inf") if step == skipped else 1.0)
        engine.commit(applied=step != skipped)
        if step != skipped:
            received = {name: received.get(name, torch.zeros(())) + gradient for name, gradient in found.items()}
    expected = {name: (steps - 1) * gradient for name, gradient in _sums(model, job).items()}
    assert not torch.allclose(received["0.weight"], expected["0.weight"], rtol=1e-4), "nothing was compressed"
    assert isinstance(engine.sums, DdpSums) and engine.sums._power is not None
    (kept,) = (error.clone() for error in engine.sums._power.error_dict.values())
    job.allreduce(kept, name="kept").wait()
    assert bool(kept.isfinite().all())
    total = sum(float(gradient.sum()) for gradient in received.values()) + float(kept.sum())
    assert total == pytest.approx(sum(float(gradient.sum()) for gradient in expected.values()), rel=1e-4)
    engine.close()


@pytest.mark.parametrize("make", [lambda: nn.Embedding(4, 2, sparse=True), lambda: nn.EmbeddingBag(4, 2, sparse=True)])
def test_sparse_gradients_are_refused(make: Callable[[], nn.Module], job: Comm) -> None:
    with pytest.raises(TaskError, match="0 has sparse gradients"):
        _engine(nn.Sequential(make()), job)
