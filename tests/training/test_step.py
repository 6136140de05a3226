"""One step: the mean over the global batch, clipping, skipping, precision, errors of a loss function."""

from __future__ import annotations

import math
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import parse_object
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import make_engine
from hvdtrain.engine.one_rank import OneRank
from hvdtrain.errors import TaskError
from hvdtrain.host_copy import HostCopy
from hvdtrain.plan.plan import Plan, plan_of
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.elastic.worker_state import make_worker_state
from hvdtrain.training.loop.buffers import Rollback
from hvdtrain.training.loop.forward import Precision, batch_size, to_device
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.step_part import Confirmation
from hvdtrain.training.loop.update import StepResult, takes_scale
from tests.support.toy import toy

CPU = torch.device("cpu")


def _stepper(
    task: Task, *, precision: str = "fp32", clip: float = 0.0, lr: float = 0.1, comm: Any = None, batch: int = 12
) -> Stepper:
    model, comm = task.model, comm or SoloComm()
    engine = Engine(torch.optim.SGD(model.parameters(), lr=lr), OneRank(lambda: list(model.named_parameters())))
    parts = [SharedBuffers(model, comm), Rollback(model)]
    return Stepper(task, model, engine, comm, Precision(precision, CPU), CPU, batch, clip, Spans(), parts)


def _batches(task: Task, micro_batch: int) -> list[Any]:
    x = cast(Any, task.train_data).x
    data = torch.stack([x[i] for i in range(12)])
    return [(part, part.sum(1)) for part in data.split(micro_batch)]


def _run(stepper: Stepper, batches: list[Any]) -> StepResult:
    return stepper.run([(lambda: None, batch) for batch in batches], len(batches), [0, 0, 0])


def _task() -> Task:
    torch.manual_seed(0)
    return toy(dropout=0.0)


def _mean_loss(task: Task) -> Tensor:
    loss, weight = task.loss(task.model, _batches(task, 12)[0])
    return loss / weight


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("micro_batch", "nominal"), [(12, 1.5), (5, 1.5), (1, 1.5), (4, 1.0), (4, 64.0)])
def test_gradient_and_loss_are_those_of_the_weighted_mean(micro_batch: int, nominal: float) -> None:
    """The nominal weight does not change the step."""
    reference = _task()
    loss = _mean_loss(reference)
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in reference.model.parameters() if p.grad is not None))
    task = replace(_task(), nominal_weight=nominal)
    before = _values(task.model)
    result = _run(_stepper(task), _batches(task, micro_batch))
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for old, new, other in zip(before, task.model.parameters(), reference.model.parameters(), strict=True):
        expected = old - 0.1 * other.grad if other.grad is not None else old
        torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-6)


def test_clipping_bounds_the_step_not_the_report() -> None:
    task, free = _task(), _task()
    before = _values(task.model)
    unclipped = _run(_stepper(free), _batches(free, 4))
    result = _run(_stepper(task, clip=0.01, lr=1.0), _batches(task, 4))
    moved = math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in zip(before, _values(task.model), strict=True)))
    assert result.grad_norm == pytest.approx(unclipped.grad_norm, rel=1e-6)
    assert result.grad_norm > 1
    assert moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_changes_nothing(poison: float, precision: str) -> None:
    task = _task()
    stepper = _stepper(task, precision=precision)
    before, scale = _values(task.model), stepper.precision.scaler.get_scale()
    batches = _batches(task, 4)
    batches[1][0][0, 0] = poison
    assert not _run(stepper, batches).applied
    assert _equal(before, _values(task.model))
    assert stepper.precision.scaler.get_scale() == (scale / 2 if precision == "fp16" else scale)
    # fp16's scale starts too high for this loss and halves until it fits.
    assert any(_run(stepper, _batches(_task(), 4)).applied for _ in range(8))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_computes_low_and_keeps_weights_fp32(precision: str) -> None:
    task = _task()
    seen: list[torch.dtype] = []
    task.model.layers[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    result = _run(_stepper(task, precision=precision), _batches(task, 4))
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert all(p.dtype == torch.float32 for p in task.model.parameters())
    assert result.loss == pytest.approx(_mean_loss(_task()).item(), rel=2e-2)


def _fused_steppers(name: str, precision: str, clip: float) -> list[Stepper]:
    """Steppers of equal models: the host decides, then the device."""
    steppers = []
    for by_device in (False, True):
        task = _task()
        parameters = list(task.model.parameters())
        optimizer = {
            "sgd": torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
            "adamw": torch.optim.AdamW(parameters, lr=0.01, fused=True),
        }[name]
        stepper = _stepper(task, precision=precision, clip=clip)
        named = list(task.model.named_parameters())
        engine = Engine(optimizer, OneRank(lambda named=named: named))
        steppers.append(replace(stepper, engine=engine, by_device=by_device))
    return steppers


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("clip", [0.0, 0.01, 1e9])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_device_decides_as_the_host_does(name: str, clip: float, precision: str) -> None:
    host, device = _fused_steppers(name, precision, clip)
    assert takes_scale(device.engine.optimizer)
    for poison in (math.nan, 0.0, 0.0, math.nan, 0.0):
        results = []
        for stepper in (host, device):
            batches = _batches(stepper.task, 5)
            batches[0][0][0, 0] += poison
            before = _values(stepper.model)
            results.append(_run(stepper, batches))
            assert results[-1].applied or _equal(before, _values(stepper.model))
        facts = [(r.applied, r.scale, r.next_scale, r.sums) for r in results]
        assert facts[0] == facts[1]
        for a, b in zip(host.model.parameters(), device.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        states = [list(stepper.engine.optimizer.state.values()) for stepper in (host, device)]
        assert [sorted(state) for state in states[0]] == [sorted(state) for state in states[1]]
        assert [s.get("step") for s in states[0]] == [s.get("step") for s in states[1]]


def test_the_host_draws_ahead_before_it_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    _, stepper = _fused_steppers("adamw", "fp32", 0.0)
    stepper.ahead = partial(order.append, "draw")
    _run(stepper, _batches(stepper.task, 5))  # the host decides on the first step
    order.clear()
    for owner, name in ((stepper.engine, "step"), (HostCopy, "tolist")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, name=name: order.append(name) or real(*a))
    _run(stepper, _batches(stepper.task, 5))
    assert order == ["step", "draw", "tolist"]


def test_only_torchs_own_fused_optimizers_decide_on_the_device() -> None:
    class Other(torch.optim.AdamW):
        """It may override `step`, and ignore what it is given."""

    parameters = [nn.Parameter(torch.zeros(2))]
    fused = [kind(parameters, fused=True) for kind in (torch.optim.AdamW, torch.optim.SGD, Other)]
    assert [takes_scale(optimizer) for optimizer in fused] == [True, True, False]
    assert not takes_scale(torch.optim.AdamW(parameters, foreach=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_run_takes_the_same_step_bit_for_bit(name: str) -> None:
    """Its first step waits for the result before the update, the uninterrupted one after it."""
    ended = []
    for resumes in (False, True):
        _, stepper = _fused_steppers(name, "fp32", 0.01)
        for step in range(3):
            if resumes and step == 2:
                stepper = replace(stepper)
            _run(stepper, _batches(stepper.task, 5))
        ended.append(_values(stepper.model))
    assert _equal(*ended)


def test_the_host_reads_the_result_after_the_device_got_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []
    read = HostCopy.tolist
    monkeypatch.setattr(HostCopy, "tolist", lambda copy: (orders[-1].append("read"), read(copy))[1])
    for stepper in _fused_steppers("adamw", "fp32", 1.0):
        stepper.engine.optimizer.register_step_pre_hook(lambda *_: orders[-1].append("update"))
        for _ in range(2):
            orders.append([])
            _run(stepper, _batches(stepper.task, 4))
    # On a CPU the host needs no copy. A device's first step waits for the host.
    assert orders == [["update"]] * 2 + [["read", "update"], ["update", "read"]]


def test_autocast_covers_the_experts() -> None:
    """The products of experts of the tiny DeepSeek model are in bf16, and their gradients in fp32."""
    from hvdtrain.task.causal_lm import ModelConfig, causal_lm

    multiply = nn.functional.grouped_mm
    seen = list[set[torch.dtype]]()

    def spy(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen[-1].update((a.dtype, b.dtype))
        return multiply(a, b, **options)

    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        model = causal_lm(ModelConfig(preset="tiny"), vocabulary=64, seq_len=16)
        run = parse_object({"task": "toy", "precision": precision}, None)
        worker = make_worker_state(
            run, plan_of(run.config), Task(model, lambda model, ids: (model, 1), [0]), CPU, RankInfo()
        )
        seen.append(set())
        with pytest.MonkeyPatch.context() as patch, worker.precision.autocast():
            patch.setattr(nn.functional, "grouped_mm", spy)
            ids = torch.arange(64).view(4, 16)
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        experts = [p for name, p in model.named_parameters() if "experts" in name and p.dim() == 3]
        assert experts and all(p.grad.dtype == torch.float32 and p.grad.abs().max() > 0 for p in experts)
    assert seen == [{torch.float32}, {torch.bfloat16}]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.tensor(1.0), "a tensor of shape ()"),
        ((torch.ones(3), 3), "(a tensor of shape (3,)"),
        ((1.5, 3), "(float 1.5, int 3)"),
        (None, "None"),
    ],
)
def test_a_loss_that_returns_the_wrong_thing(returned: Any, found: str) -> None:
    task = _task()
    with pytest.raises(TaskError) as caught:
        _run(_stepper(replace(task, loss=lambda model, batch: returned)), _batches(task, 4))
    assert found in str(caught.value.found)


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(TaskError, match="parameters from outside the model"):
        make_engine(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), nn.Linear(2, 2), SoloComm(), Plan())


def _encoding(given: dict[str, Any]) -> Any:
    return pytest.importorskip("transformers").BatchEncoding(given)


@pytest.mark.parametrize(
    "kind", [dict, OrderedDict, MappingProxyType, lambda given: ChainMap({}, given), UserDict, _encoding]
)
def test_batches_of_any_kind_move(kind: Any) -> None:
    made = kind({"a": torch.ones(2), "more": [torch.ones(1), (torch.ones(2), "text")], "n": 3})
    moved = to_device(made, torch.device("meta"))
    assert moved["a"].is_meta and moved["more"][0].is_meta and moved["more"][1][0].is_meta
    assert (moved["more"][1][1], moved["n"]) == ("text", 3)
    assert not made["a"].is_meta
    assert type(moved) is type(made) or kind is MappingProxyType


def test_batches_move_themselves_where_they_can() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    assert to_device(packed, torch.device("meta")).data.is_meta
    assert to_device(nn.Linear(1, 1), torch.device("meta")).weight.is_meta


def test_each_forward_pass_is_seeded_just_before_it() -> None:
    """Not earlier: code in between may draw random numbers, as reading the next batch does without workers."""
    done: list[str] = []
    task = _task()

    def loss(model: nn.Module, batch: Any) -> Any:
        done.append("forward")
        return task.loss(model, batch)

    def batches() -> Iterator[tuple[Callable[[], None], Any]]:
        for number, batch in enumerate(_batches(task, 4)):
            done.append("read")
            yield (lambda number=number: done.append(f"seed {number}")), batch

    _stepper(replace(task, loss=loss)).run(batches(), 3, [0, 0, 0])
    assert done == [word for n in range(3) for word in ("read", f"seed {n}", "forward")]


class LostRank(SoloComm):
    """A rank is lost during the exchange: collectives complete, but one on the CPU fails."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def allreduce(self, tensor: Tensor, *, name: str) -> Any:
        self.names.append(name)
        if name == "step/confirm":
            raise RuntimeError("a rank is lost")
        return super().allreduce(tensor, name=name)


@pytest.mark.parametrize("shared", [[], ["statistics"]])
def test_a_step_with_a_lost_rank_changes_nothing(shared: list[str]) -> None:
    """It is confirmed after the exchange, and after buffers are shared."""
    task, comm = _task(), LostRank()
    task.model.register_buffer("statistics", torch.ones(3))
    buffers = SharedBuffers(task.model, comm, _names=shared)
    stepper = replace(_stepper(task, comm=comm), parts=[buffers, Rollback(task.model), Confirmation(comm, CPU)])
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="a rank is lost"):
        _run(stepper, _batches(task, 4))
    assert comm.names[-1] == "step/confirm" and "step/totals" in comm.names
    assert ("buffers/torch.float32" in comm.names) is bool(shared)
    assert not stepper.engine.optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())


def test_the_size_of_a_batch_is_that_of_its_largest_tensor() -> None:
    ids, mask = torch.zeros(4, 128), torch.zeros(4, 1)
    assert batch_size(ids) == 512
    for batch in ([mask, ids], (ids, mask), {"ids": ids, "more": [mask]}, OrderedDict(a={"b": (mask, ids)})):
        assert batch_size(batch) == 512
    assert batch_size({"text": "abc"}) == batch_size([]) == batch_size(None) == 0


@pytest.mark.parametrize("sharing", [1, 2])
def test_a_step_counts_the_sizes_of_its_batches(sharing: int) -> None:
    """Ranks with the same samples share them: else the report would find that half of the positions have no loss."""
    stepper = replace(_stepper(_task()), sharing=sharing)
    stepper.spans.step = 7
    batches = _batches(stepper.task, 4)
    for _ in range(2):  # the second time after a roll back
        _run(stepper, batches)
        assert stepper.spans.sizes == {7: sum(x.numel() for x, _ in batches) // sharing}


class Drifting(nn.Module):
    """Multiplies by a buffer that its forward pass changes, and its backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.scale += 1
        return x * self.weight * self.scale


def test_extra_passes_leave_no_trace() -> None:
    model = Drifting()
    task = Task(model, lambda model, batch: (model(batch).sum(), float(len(batch))), [])
    stepper = _stepper(task, lr=0.0, batch=4)
    result = stepper.run([(lambda: None, torch.ones(4, 3))] * 3, 1, [0, 0, 0], extra=2)
    assert model.scale.tolist() == [2.0] * 3
    assert (result.loss, result.weight) == (6.0, 4.0) and result.grad_norm == pytest.approx(2 * 3**0.5)
