"""A divided optimizer trains as a whole one: the same bits on two ranks, and checkpoints that fit any division."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain import Task
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.muon import Muon
from hvdtrain.plan.plan import Plan
from hvdtrain.state.pieces import StateDict
from tests.laws.test_laws import check_same, record
from tests.support import own_loops
from tests.support.gallery import LANGUAGE, TOY, Recorded
from tests.support.thread_comm import ThreadComm, per_rank

SHORT = (*TOY, "--train.steps=12", "--checkpoint.every=0")
SHARD = "--parallel.shard=optimizer"
SMALL = "--parallel.bucket_mib=0.1"
"""So that the parameters of a model are gathered one after the other."""


def _equal(one: StateDict, other: StateDict) -> None:
    check_same(one, other, exchange=None)  # plans of buckets


def _close(one: StateDict, other: StateDict, tolerance: float) -> None:
    for group, tensors in one.tensors.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(other.tensors[group][name], tensor, rtol=tolerance, atol=tolerance, msg=name)


class ByDimensions(Optimizer):
    """An optimizer that looks at the number of dimensions of a parameter."""

    updates_by_element = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.mul_(0.99 if parameter.dim() > 1 else 1.0).sub_(parameter.grad, alpha=group["lr"])


class SignOfMean(Optimizer):
    """An optimizer that looks at whole tensors, and counts with plain numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    state["factor"] = float(parameter.grad.mean().sign())
                    parameter.data.sub_(parameter.grad / (1e-3 + parameter.grad.norm()), alpha=group["lr"])


def _muon(parameters: list[nn.Parameter]) -> Optimizer:
    """Muon of the matrices of the layers; the embedding is divided."""
    matrices = [p for p in parameters if p.dim() == 2 and len(p) < 400]
    rest = [p for p in parameters if not any(p is m for m in matrices)]
    return Muon([{"params": matrices, "matrices": True}, {"params": rest}], lr=2e-3)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    **own_loops.OPTIMIZERS,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "whole tensors": SignOfMean,
    "by dimensions": ByDimensions,
    "muon": lambda p: _muon([*p]),
}


def _stack(make: Callable[[Any], Optimizer], sparse: bool = False) -> Callable[[int], Task]:
    def build(rank: int) -> Task:
        model = own_loops.Model()
        model.embedding.sparse = sparse
        data = torch.randint(0, 400, (64, 6))

        def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
            logits = model(batch[0][:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="sum"), 5

        return Task(model, loss, torch.utils.data.TensorDataset(data), optimizer=make(model.parameters()))

    return build


FAST = [("adamw", "fp32"), ("adamw", "fp16")]
SLOW = [pytest.param(name, "fp32", marks=pytest.mark.slow) for name in OPTIMIZERS if name != "adamw"]
SLOW += [pytest.param("momentum", "bf16", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("optimizer", "precision"), [*FAST, *SLOW])
def test_law_9_of_a_divided_optimizer(optimizer: str, precision: str, tmp_path: Path) -> None:
    """Two ranks have the bits of two ranks that each have all; four ranks the values of one."""
    options = [*SHORT[1:], f"--precision={precision}"]
    build = _stack(OPTIMIZERS[optimizer])
    whole = record(tmp_path / "whole", *options, size=2, build=build)
    two = record(tmp_path / "two", *options, SHARD, SMALL, size=2, build=build)
    assert two.losses() == whole.losses() and whole.losses()[-1] < whole.losses()[0]
    saved = two.state()
    numbers = saved.tensors.pop("optimizer_values", {})  # type: ignore[attr-defined]
    if numbers:
        plain = {key: value.item() for key, value in numbers.items()}
        saved = StateDict(saved.tensors, {**saved.values, "optimizer": plain})
    _equal(saved, whole.state())
    if precision != "fp16":
        one = record(tmp_path / "one", *options, size=1, build=build)
        for stop, size in ((5, 3), (12, 4)):  # a tensor is divided at other rows after the resume
            four = record(tmp_path / "four", *options, SHARD, f"--train.stop_at={stop}", size=size, build=build)
        # Sums in another order may round a weight to another bf16 number.
        assert four.losses() == pytest.approx(one.losses(), rel=2e-6 if precision == "fp32" else 2e-3)
        _close(StateDict({"model": one.state().tensors["model"]}, {}), four.state(), 1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "by dimensions"])
def test_law_9_of_divided_rows(optimizer: str, elements: None, tmp_path: Path) -> None:
    """An own optimizer gets parameters of as many dimensions as before."""
    test_law_9_of_a_divided_optimizer(optimizer, "fp32", tmp_path)


Alone = Callable[[tuple[str, ...]], Recorded]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The training by one rank."""
    return cache(lambda options: record(tmp_path_factory.mktemp("one"), *options))


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(("size", "options"), [(2, SHORT), (3, LANGUAGE), (5, LANGUAGE)])
@pytest.mark.some(2)
def test_law_1_with_dropout_and_uneven_micro_batches(
    size: int, options: tuple[str, ...], shard: str, alone: Alone, tmp_path: Path
) -> None:
    """The toy has dropout; the language model has 4 micro-batches a step, so that a rank is idle."""
    divided = record(tmp_path, *options, f"--parallel.shard={shard}", size=size)
    assert divided.losses() == pytest.approx(alone(options).losses(), rel=2e-6)


class Triple(torch.autograd.Function):
    """A function that calls no operation of torch with the parameter itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return 3 * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * gradient


class Peeking(nn.Module):
    """Uses the weight of its last block first, and one of a module that it never calls; both by themselves.

    One of its parameters has no elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(300, 300)
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.layers[3].weight + self.empty.sum()
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h @ Triple.apply(self.head.weight)  # type: ignore[no-untyped-call, no-any-return]


def test_parameters_are_there_when_others_than_their_module_use_them(tmp_path: Path) -> None:
    def build(rank: int) -> Task:
        torch.manual_seed(5)
        model = Peeking()
        data = torch.utils.data.TensorDataset(torch.randn(64, 300))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Task(
            model, lambda m, batch: ((m(batch[0]) - 1).square().mean(1).sum(), len(batch[0])), data, optimizer=optimizer
        )

    # Averages (--train.ema) would wait for all parameters after each step.
    options = [option for option in SHORT[1:] if "ema" not in option]
    whole = record(tmp_path / "whole", *options, size=2, build=build)
    divided = record(tmp_path / "divided", *options, SHARD, SMALL, size=2, build=build)
    assert divided.losses() == whole.losses()


def test_an_overflow_on_one_rank_is_one_for_all(tmp_path: Path) -> None:
    """The gradient of `left`, which rank 0 owns, overflows under the first loss scale; that of `right` never does."""

    def build(rank: int) -> Task:
        def loss(model: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
            return (100 * model["left"][0].half().float() + model["right"].sum()) * batch[0].sum(), len(batch[0])

        model = nn.ParameterDict({"left": torch.ones(70000), "right": torch.ones(70000)})
        data = torch.utils.data.TensorDataset(torch.ones(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return Task(model, loss, data, optimizer=optimizer)

    options = (*SHORT[1:], "--precision=fp16", "--train.clip=0", "--train.max_skipped=99", "--checkpoint.every=0")
    whole = record(tmp_path / "whole", *options, size=2, build=build).state()
    divided = record(tmp_path / "divided", *options, SHARD, size=2, build=build).state()
    assert 0 < whole.values["progress"]["skipped"] < 12
    _equal(divided, whole)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_law_2_resumed_equals_uninterrupted(optimizer: str, tmp_path: Path) -> None:
    options = (*LANGUAGE, SHARD, f"--optimizer.name={optimizer}")
    whole = record(tmp_path / "whole", *options, size=2)
    for stop in (3, 8):
        parts = record(tmp_path / "parts", *options, f"--train.stop_at={stop}", size=2)
    assert parts.losses() == whole.losses()
    _equal(parts.state(), whole.state())


@pytest.mark.parametrize("compression", [pytest.param("none", marks=pytest.mark.slow), "int8"])
def test_an_optimizer_in_the_memory_of_the_host_has_the_same_bits(compression: str, tmp_path: Path) -> None:
    """Also after a resume: the parameters there are those of the checkpoint then."""
    options = (*LANGUAGE, SHARD, f"--parallel.compression={compression}", "--checkpoint.every=3")
    device = record(tmp_path / "device", *options, size=2)
    for stop in (3, 8):
        host = record(tmp_path / "host", *options, "--memory.offload=optimizer", f"--train.stop_at={stop}", size=2)
    assert host.losses() == device.losses()
    _equal(host.state(), device.state())
    assert any("saves nothing on CPUs" in event["text"] for event in host.events("warning"))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_law_10_a_checkpoint_fits_any_division(optimizer: str, alone: Alone, tmp_path: Path) -> None:
    """1 rank, 3 divided ones, 2 whole ones, 4 divided ones: the curve is that of one rank."""
    given = (*LANGUAGE, f"--optimizer.name={optimizer}")
    one = alone(given)
    stages = ((1, 2, ()), (3, 4, (SHARD,)), (2, 6, ()), (4, 8, (SHARD,)))
    for size, stop, options in stages:
        resized = record(tmp_path / "resized", *given, *options, f"--train.stop_at={stop}", size=size)
    assert resized.losses() == pytest.approx(one.losses(), rel=2e-6)
    _close(one.state(), resized.state(), 1e-4)


def test_a_task_may_be_trained_again(tmp_path: Path) -> None:
    """Its optimizer has the model's parameters again, and no state of the first training."""
    tasks: dict[int, Task] = {}

    def build(rank: int) -> Task:
        return tasks.setdefault(rank, _stack(OPTIMIZERS["momentum"])(rank))

    first = record(tmp_path / "first", *SHORT[1:], SHARD, size=2, build=build)
    optimizer: Any = tasks[0].optimizer
    assert [*optimizer.param_groups[0]["params"]] == [*tasks[0].model.parameters()] and not optimizer.state
    again = record(tmp_path / "again", *SHORT[1:], SHARD, size=2, build=build)
    assert again.losses()[-1] < first.losses()[-1] < first.losses()[0]


def _with_loss(kind: str, change: Callable[[Any, Tensor, Any], Any]) -> Callable[[int], Task]:
    """The stack; `change` gets the model, the batch and the loss with its weight, and returns what replaces them."""

    def build(rank: int) -> Task:
        task = _stack(OPTIMIZERS[kind])(rank)

        def loss(model: nn.Module, batch: list[Tensor]) -> Any:
            return change(model, batch[0], task.loss(model, batch))

        return Task(task.model, loss, task.train_data, optimizer=task.optimizer)

    return build


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    """Also where no module announces them."""
    with pytest.raises(ConfigError, match="embedding makes sparse gradients"):
        record(tmp_path, *SHORT[1:], SHARD, size=2, build=_stack(OPTIMIZERS["momentum"], sparse=True))
    build = _with_loss(
        "momentum", lambda m, x, _: (nn.functional.embedding(x, m.embedding.weight, sparse=True).sum(), 1)
    )
    with pytest.raises(TaskError, match=r"embedding\.weight is sparse"):
        record(tmp_path, *SHORT[1:], SHARD, size=2, build=build)


@pytest.mark.parametrize(("size", "message"), [(1, "divides the optimizer among ranks"), (8, "too few parameters")])
@per_rank()
def test_what_cannot_be_divided_is_refused(comm: ThreadComm, size: int, message: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=message):
        make_engine(torch.optim.SGD(model.parameters()), model, comm, Plan(shard="optimizer"))


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_skipped_step_is_replayed_and_leaves_no_trace(shard: str, tmp_path: Path) -> None:
    """A sample makes the loss nan on one rank. The cause is found without an exchange with the other."""
    build = _with_loss("adamw", lambda m, x, loss: (loss[0] * (float("nan") if (x == 17).any() else 1.0), loss[1]))
    options = (*SHORT[1:], "--train.max_skipped=99")
    whole = record(tmp_path / "whole", *options, size=2, build=build)
    divided = record(tmp_path / "divided", *options, f"--parallel.shard={shard}", size=2, build=build)
    progress = divided.state().values["progress"]
    expected = whole.state().values["progress"]
    assert progress["skipped"] == expected["skipped"] and 0 < progress["skipped"] < 12
    assert progress["losses"] == pytest.approx(expected["losses"], rel=2e-6)
    found = divided.events("not_finite")
    assert found and not any(line["failures"] for line in found)


def test_parameters_may_be_frozen_and_freed(tmp_path: Path) -> None:
    """A block is frozen at first and trained from step 3 on; another is frozen from step 6 on."""

    def build(rank: int) -> Task:
        task = _stack(OPTIMIZERS["momentum"])(rank)
        model: Any = task.model
        model.layers[0].requires_grad_(False)

        def schedule(step: int) -> float:  # called before each step
            model.layers[0].requires_grad_(step >= 3)
            model.layers[1].requires_grad_(step < 6)
            return 1.0

        return Task(model, task.loss, task.train_data, optimizer=task.optimizer, schedule=schedule)

    whole = record(tmp_path / "whole", *SHORT[1:], size=2, build=build)
    divided = record(tmp_path / "divided", *SHORT[1:], SHARD, SMALL, size=2, build=build)
    assert divided.losses() == whole.losses()
    _equal(divided.state(), whole.state())


def test_parameters_may_be_added(tmp_path: Path) -> None:
    """From step 3 on, the optimizer has those of a block, too. It keeps them after the training."""
    tasks: dict[str, Task] = {}

    def build(name: str, rank: int) -> Task:
        task = _stack(OPTIMIZERS["momentum"])(rank)
        model: Any = task.model
        added = [*model.layers[1].parameters()]
        rest = [p for p in model.parameters() if all(p is not each for each in added)]
        optimizer = OPTIMIZERS["momentum"](rest)

        def schedule(step: int) -> float:  # called before each step
            if step == 3:
                optimizer.param_groups[0]["params"] += added
            return 1.0

        task = Task(model, task.loss, task.train_data, optimizer=optimizer, schedule=schedule)
        if rank == 0:
            tasks[name] = task
        return task

    alone = record(tmp_path / "alone", *SHORT[1:], size=1, build=partial(build, "alone"))
    whole = record(tmp_path / "whole", *SHORT[1:], size=2, build=partial(build, "whole"))
    divided = record(tmp_path / "divided", *SHORT[1:], SHARD, SMALL, size=2, build=partial(build, "divided"))
    assert whole.losses() == pytest.approx(alone.losses(), rel=2e-6)
    assert divided.losses() == whole.losses()
    optimizer: Any = tasks["divided"].optimizer
    assert {*optimizer.param_groups[0]["params"]} == {*tasks["divided"].model.parameters()}
