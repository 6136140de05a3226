"""A number that is not finite is followed back to the module, the line and the sample that made it."""

from __future__ import annotations

import copy
import gc
import inspect
import random
from collections.abc import Callable
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
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.diagnostics.step_replay import Finding, replay
from hvdtrain.training.loop.forward import Precision
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper, StepResult
from tests.support import faulty
from tests.support.faulty import BAD

CPU = torch.device("cpu")
GLOBAL, MICRO = 8, 4


def _parts(task: Task, precision: str = "fp32", micro: int = MICRO) -> tuple[Stepper, Stream]:
    comm = SoloComm()
    engine = make_engine(torch.optim.SGD(task.model.parameters(), lr=0.1), task.model, comm, "none")
    stepper = Stepper(
        task,
        task.model,
        engine,
        comm,
        Precision(precision, CPU),
        CPU,
        GLOBAL,
        1.0,
        Spans(),
        SharedBuffers(task.model, comm),
    )
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


@pytest.mark.parametrize(
    ("function", "words", "name"),
    [
        (faulty.divides, "x / (", "div"),
        (faulty.logs, "torch.log", "log"),
        (faulty.overflows, "torch.exp", "exp"),
        (faulty.in_place, "x[:, 1] /", "div"),
        (faulty.all_masked, "torch.softmax", "softmax"),
    ],
)
def test_forward_names_module_function_line_and_sample(
    function: Callable[[Tensor], Tensor], words: str, name: str
) -> None:
    task = _marked(function)
    found = _find(task)
    assert (found.origin.kind, found.origin.module, found.origin.module_type) == ("forward", "blocks.1", "Culprit")
    assert name in str(found.origin.function)
    assert found.origin.place == _line(function, words)
    assert (found.positions, found.samples, found.indices) == ([4, 8], [5], [_index(5, task)])


def test_a_function_that_is_not_torchs_is_named_by_its_module() -> None:
    found = _find(_marked(faulty.unseen))
    assert (found.origin.kind, found.origin.module) == ("forward", "blocks.1")
    assert "_Square" in str(found.origin.function)
    assert found.samples == [5]


def test_backward_names_module_function_line_and_sample() -> None:
    found = _find(_marked(faulty.roots))
    assert (found.origin.kind, found.origin.module) == ("backward", "blocks.1")
    assert found.origin.function == "SqrtBackward0"
    assert found.origin.place == _line(faulty.roots, "torch.sqrt")
    assert found.samples == [5]


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

    found = _find(Task(base.model, loss, base.train_data))
    assert (found.origin.kind, found.origin.module) == ("backward" if backward else "forward", None)
    assert found.origin.place == _line(loss, "torch.sqrt")
    assert found.samples == [5]


def test_fp16_gradients_beyond_their_range() -> None:
    base = faulty.faulty(nn.Identity(), [])

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return (model(x) * 100.0).sum(), len(x)

    found = _find(Task(base.model, loss, base.train_data), "fp16", 65536.0)
    assert (found.origin.kind, found.origin.module) == ("overflow", None)
    assert found.origin.place == _line(loss, "* 100.0")


def test_fp16_gradients_that_no_scale_helps() -> None:
    found = _find(_marked(faulty.roots), "fp16", 65536.0)
    assert (found.origin.kind, found.origin.module) == ("backward", "blocks.1")


def test_a_norm_that_overflows() -> None:
    base = faulty.faulty(nn.Identity(), [])

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model.head.weight.sum() * 1e25 + model(x).sum(), len(x)  # type: ignore[union-attr]

    found = _find(Task(base.model, loss, base.train_data))
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

    stepper, stream = _parts(Task(base.model, loss, base.train_data))
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
    frozen = base.model.before[0].register_parameter("extra", nn.Parameter(torch.ones(())))  # type: ignore[index,func-returns-value]
    assert frozen is None
    first = iter([True, True])

    def loss(model: Any, x: Tensor) -> tuple[Tensor, int]:
        model.drop.train(next(first, False))
        value, weight = base.loss(model, x)
        return value + model.before[0].extra, weight  # type: ignore[return-value]

    task = Task(base.model, loss, base.train_data)
    optimizer = torch.optim.SGD(task.model.head.parameters(), lr=0.1)  # type: ignore[union-attr]
    comm = SoloComm()
    engine = make_engine(optimizer, task.model, comm, "none", Spans())
    stepper = Stepper(
        task,
        task.model,
        engine,
        comm,
        Precision("fp32", CPU),
        CPU,
        GLOBAL,
        1.0,
        Spans(),
        SharedBuffers(task.model, comm),
    )
    stream = Stream(task.train_data, 0, GLOBAL, 8, 0, 1)
    _step(stepper, stream)
    _step(stepper, stream)  # what nobody clears adds up
    before, gradient = _everything(stepper), task.model.before[0].extra.grad.clone()  # type: ignore[index]
    assert replay(stepper, stream, 0, 1.0)[0]
    _assert_same(before, _everything(stepper))
    assert torch.equal(task.model.before[0].extra.grad, gradient)  # type: ignore[index]


class _Checkpointed(nn.Module):
    """Its activations are made again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("function", [faulty.divides, faulty.roots])
def test_checkpointed_activations(function: Callable[[Tensor], Tensor]) -> None:
    task = _marked(function)
    task.model.blocks[1] = _Checkpointed(task.model.blocks[1])  # type: ignore[index,operator]
    found = _find(task)
    assert (found.origin.module, found.samples) == ("blocks.1.inner", [5])


@pytest.mark.parametrize(
    "function",
    [pytest.param(each, marks=pytest.mark.slow) for each in (faulty.divides, faulty.roots, nn.Identity())],
)
def test_a_replay_leaves_nothing_in_memory(function: Callable[[Tensor], Tensor]) -> None:
    stepper, stream = _parts(_marked(function))
    counts = []
    for _ in range(3):
        _step(stepper, stream)
        replay(stepper, stream, 0, 1.0)
        gc.collect()
        counts.append(sum("Backward" in type(thing).__name__ for thing in gc.get_objects()))
    assert counts[1] == counts[2]
