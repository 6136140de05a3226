"""A number that is not finite is followed back to the module, the line and the sample that made it."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.schema import LoaderConfig
from hvdtrain.data.loader import Stream, seed_forward, train_batches
from hvdtrain.engine.make import make_engine
from hvdtrain.plan.plan import Plan
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.diagnostics.step_replay import Finding, replay
from hvdtrain.training.loop.buffers import Rollback
from hvdtrain.training.loop.forward import Precision
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.update import StepResult
from tests.support import faulty
from tests.support.faulty import BAD

CPU = torch.device("cpu")
GLOBAL, MICRO = 8, 4


def _parts(
    task: Task, precision: str = "fp32", micro: int = MICRO, trained: nn.Module | None = None
) -> tuple[Stepper, Stream]:
    model, comm = task.model, SoloComm()
    engine = make_engine(torch.optim.SGD((trained or model).parameters(), lr=0.1), model, comm, Plan())
    parts = [SharedBuffers(model, comm), Rollback(model)]
    stepper = Stepper(task, model, engine, comm, Precision(precision, CPU), CPU, GLOBAL, 1.0, Spans(), parts)
    return stepper, Stream(task.train_data, 0, GLOBAL, micro, 0, 1)


def _step(stepper: Stepper, stream: Stream, position: int = 0) -> StepResult:
    batches = train_batches(stream, position, 1, LoaderConfig(), stepper.task.collate, on_cuda=False)
    mine = stream.step(position)
    return stepper.run([(partial(seed_forward, 0, b.start), next(batches).batch) for b in mine], len(mine), [0, 0, 0])


def _index(position: int, task: Task) -> int:
    stream = Stream(task.train_data, 0, GLOBAL, MICRO, 0, 1)
    return [i for key in stream.keys(0, 1) for i in key[1:]][position]


def _find(task: Task, precision: str = "fp32", scale: float = 1.0) -> Finding:
    stepper, stream = _parts(task, precision)
    assert not _step(stepper, stream).applied
    findings, failures = replay(stepper, stream, 0, scale)
    assert failures == {}
    return findings[0]


def _line(function: Callable[..., Any], words: str) -> str:
    lines, first = inspect.getsourcelines(function)
    number = next(first + i for i, line in enumerate(lines) if words in line)
    return f"{inspect.getsourcefile(function)}:{number}"


def _marked(function: Callable[[Tensor], Tensor], position: int = 5, **how: Any) -> Task:
    probe = faulty.faulty(function, [])
    return faulty.faulty(function, [_index(position, probe)], **how)


FORWARD = {"kind": "forward", "module": "blocks.1", "module_type": "Culprit"}
BACKWARD = FORWARD | {"kind": "backward"}


@pytest.mark.parametrize(
    ("function", "expected", "name", "words"),
    [
        (faulty.divides, FORWARD, "div", "x / ("),
        (faulty.logs, FORWARD, "log", "torch.log"),
        (faulty.overflows, FORWARD, "exp", "torch.exp"),
        (faulty.in_place, FORWARD, "div", "x[:, 1] /"),
        (faulty.all_masked, FORWARD, "softmax", "torch.softmax"),
        (faulty.roots, BACKWARD, "SqrtBackward0", "torch.sqrt"),
        (faulty.unseen, FORWARD, "_Square", ""),  # not a function of torch
    ],
)
def test_module_function_line_and_sample_are_named(
    function: Callable[[Tensor], Tensor], expected: dict[str, str], name: str, words: str
) -> None:
    task = _marked(function)
    found = _find(task)
    assert expected.items() <= vars(found.origin).items()
    assert name in str(found.origin.function)
    assert not words or found.origin.place == _line(function, words)
    assert (found.positions, found.samples, found.indices) == ([4, 8], [5], [_index(5, task)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite(value: float) -> None:
    found = _find(_marked(nn.Identity(), value=value))
    assert (found.origin.kind, found.samples) == ("input", [5])


def test_a_parameter_that_is_not_finite() -> None:
    task = _marked(nn.Identity())
    with torch.no_grad():
        task.model.norm.weight[2] = torch.nan  # type: ignore[index]
    found = _find(task)
    assert (found.origin.kind, found.origin.module, found.origin.tensor) == ("parameter", "norm", "norm.weight")


@pytest.mark.parametrize("backward", [False, True])
def test_the_loss_function_itself(backward: bool) -> None:
    base = _marked(nn.Identity())

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        value = (model(x) ** 2).sum()
        rest = (x[:, 0] - BAD).abs().min()
        return value + (torch.sqrt(rest * value) if backward else torch.log(rest)), len(x)

    found = _find(replace(base, loss=loss))
    assert (found.origin.kind, found.origin.module) == ("backward" if backward else "forward", None)
    assert found.origin.place == _line(loss, "torch.sqrt")
    assert found.samples == [5]


def test_fp16_gradients_beyond_their_range() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return (model(x) * 100.0).sum(), len(x)

    found = _find(replace(faulty.faulty(nn.Identity(), []), loss=loss), "fp16", 65536.0)
    assert (found.origin.kind, found.origin.module) == ("overflow", None)
    assert found.origin.place == _line(loss, "* 100.0")
    found = _find(_marked(faulty.roots), "fp16", 65536.0)  # no scale helps
    assert (found.origin.kind, found.origin.module) == ("backward", "blocks.1")


def test_a_norm_that_overflows() -> None:
    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model.head.weight.sum() * 1e25 + model(x).sum(), len(x)  # type: ignore[union-attr]

    found = _find(replace(faulty.faulty(nn.Identity(), []), loss=loss))
    assert (found.origin.kind, found.origin.tensor) == ("overflow", "head.weight")


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    stepper, stream = _parts(faulty.faulty(faulty.harmless, []))
    assert _step(stepper, stream).applied
    assert replay(stepper, stream, 0, 1.0) == ([], {})


def test_a_replay_that_raises_is_reported() -> None:
    base = _marked(faulty.divides)
    calls = iter([False] * (GLOBAL // MICRO))

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        if next(calls, True):
            raise RuntimeError("once is enough")
        return base.loss(model, x)  # type: ignore[return-value]

    stepper, stream = _parts(replace(base, loss=loss))
    _step(stepper, stream)
    before = _everything(stepper)
    assert replay(stepper, stream, 0, 1.0) == ([], {0: "RuntimeError: once is enough"})
    _assert_same(before, _everything(stepper))


def _everything(stepper: Stepper) -> dict[str, Any]:
    return {
        "model": copy.deepcopy(stepper.model.state_dict()),
        "modes": [m.training for m in stepper.model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in stepper.model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "scaler": stepper.precision.scaler.state_dict(),
        "anomaly": torch.is_anomaly_enabled(),
    }


def _assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [faulty.divides, faulty.roots, nn.Identity()])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_training_is_untouched_bit_for_bit(function: Callable[[Tensor], Tensor], precision: str) -> None:
    ends = []
    for replaying in (False, True):
        stepper, stream = _parts(_marked(function), precision)
        stepper.model.drop.eval()  # type: ignore[union-attr]
        for position in (8, 0, 8, 16):
            _step(stepper, stream, position)
            if replaying:
                before = _everything(stepper)
                replay(stepper, stream, position, 1.0)
                _assert_same(before, _everything(stepper))
        ends.append(_everything(stepper))
    _assert_same(*ends)


def test_modes_and_gradients_that_the_optimizer_never_sees_stay() -> None:
    base = _marked(faulty.divides)
    extra = nn.Parameter(torch.ones(()))
    base.model.before[0].register_parameter("extra", extra)  # type: ignore[index]
    first = iter([True, True])

    def loss(model: Any, x: Tensor) -> tuple[Tensor, int]:
        model.drop.train(next(first, False))
        value, weight = base.loss(model, x)
        return value + extra, weight  # type: ignore[return-value]

    stepper, stream = _parts(replace(base, loss=loss), micro=8, trained=base.model.head)  # type: ignore[arg-type]
    for _ in range(2):  # what nobody clears adds up
        _step(stepper, stream)
    before, gradient = _everything(stepper), extra.grad.clone()  # type: ignore[union-attr]
    assert replay(stepper, stream, 0, 1.0)[0]
    _assert_same(before, _everything(stepper))
    assert torch.equal(extra.grad, gradient)  # type: ignore[arg-type]


class _Checkpointed(nn.Sequential):
    """Its activations are made again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("function", [faulty.divides, faulty.roots])
def test_checkpointed_activations(function: Callable[[Tensor], Tensor]) -> None:
    task = _marked(function)
    task.model.blocks[1] = _Checkpointed(task.model.blocks[1])  # type: ignore[index,operator]
    found = _find(task)
    assert (found.origin.module, found.samples) == ("blocks.1.0", [5])
