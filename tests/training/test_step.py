"""One step: the mean over the global batch, clipping, skipping, precision, errors of a loss function."""

from __future__ import annotations

import math
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import parse_object
from hvdtrain.engine.local import LocalEngine
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import TaskError
from hvdtrain.host_copy import HostCopy
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.elastic.worker_state import make_worker_state
from hvdtrain.training.loop.forward import Precision, batch_size
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.step import Stepper, StepResult, takes_scale, to_device
from tests.support.toy import toy

CPU = torch.device("cpu")


def _stepper(task: Task, *, precision: str = "fp32", clip: float = 0.0, lr: float = 0.1) -> Stepper:
    optimizer = torch.optim.SGD(task.model.parameters(), lr=lr)
    engine = LocalEngine(list(task.model.named_parameters()), optimizer)
    comm = SoloComm()
    buffers = SharedBuffers(task.model, comm)
    return Stepper(task, task.model, engine, comm, Precision(precision, CPU), CPU, 12, clip, Spans(), buffers)


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
    x, y = _batches(task, 12)[0]
    loss, weight = task.loss(task.model, (x, y))
    return loss / weight


@pytest.mark.parametrize("micro_batch", [12, 5, 1])
def test_gradient_and_loss_are_those_of_the_weighted_mean(micro_batch: int) -> None:
    reference = _task()
    loss = _mean_loss(reference)
    loss.backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in reference.model.parameters() if p.grad is not None))
    task = _task()
    before = [p.clone() for p in task.model.parameters()]
    result = _run(_stepper(task), _batches(task, micro_batch))
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    for old, new, other in zip(before, task.model.parameters(), reference.model.parameters(), strict=True):
        expected = old - 0.1 * other.grad if other.grad is not None else old
        torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-6)


def test_the_nominal_weight_does_not_change_the_step() -> None:
    results = []
    for nominal in (1.0, 64.0):
        task = _task()
        task = Task(task.model, task.loss, task.train_data, nominal_weight=nominal)
        result = _run(_stepper(task), _batches(task, 4))
        results.append((result, [p.clone() for p in task.model.parameters()]))
    assert results[0][0].grad_norm == pytest.approx(results[1][0].grad_norm, rel=1e-6)
    for a, b in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(a, b)


def test_clipping_bounds_the_step_not_the_report() -> None:
    task, free = _task(), _task()
    before = [p.clone() for p in task.model.parameters()]
    unclipped = _run(_stepper(free), _batches(free, 4))
    result = _run(_stepper(task, clip=0.01, lr=1.0), _batches(task, 4))
    moved = math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in zip(before, task.model.parameters(), strict=True)))
    assert result.grad_norm == pytest.approx(unclipped.grad_norm, rel=1e-6)
    assert result.grad_norm > 1
    assert moved == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_that_is_not_finite_changes_nothing(poison: float, precision: str) -> None:
    task = _task()
    stepper = _stepper(task, precision=precision)
    before = [p.clone() for p in task.model.parameters()]
    batches = _batches(task, 4)
    batches[1][0][0, 0] = poison
    result = _run(stepper, batches)
    assert not result.applied
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))
    # fp16's scale starts too high for this loss and halves until it fits.
    assert any(_run(stepper, _batches(_task(), 4)).applied for _ in range(8))


def test_fp16_halves_its_scale_after_overflow() -> None:
    task = _task()
    stepper = _stepper(task, precision="fp16")
    scale = stepper.precision.scaler.get_scale()
    batches = _batches(task, 4)
    batches[0][0][0, 0] = math.inf
    _run(stepper, batches)
    assert stepper.precision.scaler.get_scale() == scale / 2


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
        engine = LocalEngine(list(task.model.named_parameters()), optimizer)
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
            before = [p.clone() for p in stepper.model.parameters()]
            results.append(_run(stepper, batches))
            if not results[-1].applied:
                assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
        facts = [(r.applied, r.scale, r.next_scale, r.sums) for r in results]
        assert facts[0] == facts[1]
        for a, b in zip(host.model.parameters(), device.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        states = [list(stepper.engine.optimizer.state.values()) for stepper in (host, device)]
        assert [sorted(state) for state in states[0]] == [sorted(state) for state in states[1]]
        assert [s.get("step") for s in states[0]] == [s.get("step") for s in states[1]]


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
        ended.append([p.clone() for p in stepper.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))


def test_the_host_reads_the_result_after_the_device_got_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []
    read = HostCopy.tolist
    monkeypatch.setattr(HostCopy, "tolist", lambda copy: (orders[-1].append("read"), read(copy))[1])
    for stepper in _fused_steppers("adamw", "fp32", 1.0):
        stepper.engine.optimizer.register_step_pre_hook(lambda *_: orders[-1].append("update"))
        for _ in range(2):
            orders.append([])
            _run(stepper, _batches(stepper.task, 4))
    assert orders == [["read", "update"]] * 3 + [["update", "read"]]


def _mixture(precision: str) -> tuple[float, list[torch.dtype], dict[str, Tensor]]:
    """The loss of the tiny DeepSeek model, the dtypes of its products of experts, and the gradients of experts."""
    from hvdtrain.task.language_model import ModelConfig, causal_lm

    torch.manual_seed(0)
    model = causal_lm(ModelConfig(preset="tiny"), vocabulary=64, seq_len=16)
    task = Task(model, lambda model, ids: (model(input_ids=ids, labels=ids).loss * len(ids), len(ids)), [0])
    run = parse_object({"task": "toy", "precision": precision}, None)
    worker = make_worker_state(run, task, CPU, RankInfo())
    seen: list[torch.dtype] = []
    multiply = nn.functional.grouped_mm

    def spy(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        seen.extend([a.dtype, b.dtype])
        return multiply(a, b, **options)

    with pytest.MonkeyPatch.context() as patch, worker.precision.autocast():
        patch.setattr(nn.functional, "grouped_mm", spy)
        loss = model(input_ids=torch.arange(64).view(4, 16), labels=torch.arange(64).view(4, 16)).loss
    loss.backward()
    gradients = {
        n: p.grad for n, p in model.named_parameters() if "experts" in n and p.dim() == 3 and p.grad is not None
    }
    return loss.item(), seen, gradients


def test_autocast_covers_the_experts() -> None:
    loss, dtypes, gradients = _mixture("fp32")
    low_loss, low_dtypes, low_gradients = _mixture("bf16")
    assert dtypes and set(dtypes) == {torch.float32} and set(low_dtypes) == {torch.bfloat16}
    assert low_loss == pytest.approx(loss, rel=2e-3)
    assert gradients and gradients.keys() == low_gradients.keys()
    for name, gradient in low_gradients.items():
        assert gradient.dtype == torch.float32
        assert nn.functional.cosine_similarity(gradient.flatten(), gradients[name].flatten(), dim=0) > 0.9


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.tensor(1.0), "a tensor of shape () and torch.float32"),
        ((torch.ones(3), 3), "tuple of (a tensor of shape (3,) and torch.float32, int 3)"),
        ((1.5, 3), "tuple of (float 1.5, int 3)"),
        (None, "NoneType None"),
    ],
)
def test_a_loss_that_returns_the_wrong_thing(returned: Any, found: str) -> None:
    task = _task()
    wrong = Task(task.model, lambda model, batch: returned, task.train_data)
    with pytest.raises(TaskError) as caught:
        _run(_stepper(wrong), _batches(task, 4))
    assert caught.value.found == found
    assert "sum of the losses" in str(caught.value.expected)


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(TaskError, match="parameters from outside the model"):
        make_engine(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), nn.Linear(2, 2), SoloComm(), "none")


def test_batches_move_in_any_nesting() -> None:
    batch = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta
    assert (moved["a"][1][1], moved["b"]) == ("text", 3)


def test_batches_of_other_kinds_move() -> None:
    """What transformers' collators make, and what moves itself."""
    from transformers import BatchEncoding

    encoding = BatchEncoding({"input_ids": torch.ones(1), "more": [torch.ones(2)]})
    moved = to_device(encoding, torch.device("meta"))
    assert type(moved) is BatchEncoding and moved["input_ids"].is_meta and moved["more"][0].is_meta
    assert not encoding["input_ids"].is_meta
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    assert to_device(packed, torch.device("meta")).data.is_meta
    assert to_device(nn.Linear(1, 1), torch.device("meta")).weight.is_meta


def test_every_kind_of_mapping_moves() -> None:
    content = {"a": torch.ones(2), "n": 1}
    mappings: list[Any] = [MappingProxyType(content), OrderedDict(content), ChainMap({}, content)]
    for made in mappings:
        moved = to_device(made, torch.device("meta"))
        assert moved["a"].is_meta and moved["n"] == 1 and not made["a"].is_meta
    assert isinstance(moved, ChainMap)


def test_spans_add_up_to_the_step() -> None:
    task = _task()
    stepper = _stepper(task)
    start = stepper.spans.now()
    _run(stepper, _batches(task, 1))
    elapsed = (stepper.spans.now() - start) * 1e-9
    seconds = stepper.spans.pop_seconds()
    assert seconds.keys() == {"copy", "forward", "backward", "wait", "clip", "optimizer"}
    assert 0 < sum(seconds.values()) <= elapsed


def test_residuals_of_several_ranks_follow_the_loss_scale_on_one() -> None:
    engine = LocalEngine([], torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    left = {"p/residual": torch.ones(3), "p/powersgd_q": torch.ones(3)}
    engine.load_state_dict(left, {"plan": None, "ranks": 2})
    engine.rescale(0.5)
    kept = engine.state_dict()[0]
    assert kept["p/residual"].tolist() == [0.5] * 3
    assert kept["p/powersgd_q"].tolist() == [1.0] * 3


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


def test_a_step_with_a_lost_rank_changes_nothing() -> None:
    task, comm = _task(), LostRank()
    stepper = replace(_stepper(task), comm=comm, buffers=SharedBuffers(task.model, comm), confirms=True)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    with pytest.raises(RuntimeError, match="a rank is lost"):
        _run(stepper, _batches(task, 4))
    assert comm.names == ["step/totals", "step/confirm"], "after the exchange"
    assert not stepper.engine.optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())


def test_buffers_are_shared_before_a_step_is_confirmed() -> None:
    task, comm = _task(), LostRank()
    task.model.register_buffer("statistics", torch.ones(3))
    buffers = SharedBuffers(task.model, comm)
    buffers._names = ["statistics"]
    stepper = replace(_stepper(task), comm=comm, buffers=buffers, confirms=True)
    with pytest.raises(RuntimeError, match="a rank is lost"):
        _run(stepper, _batches(task, 4))
    assert comm.names[-1] == "step/confirm" and "buffers/torch.float32" in comm.names[:-1]
    assert torch.equal(task.model.statistics, torch.ones(3))


def test_the_size_of_a_batch_is_that_of_its_largest_tensor() -> None:
    ids, mask = torch.zeros(4, 128), torch.zeros(4, 1)
    assert batch_size(ids) == 512
    for batch in ([mask, ids], (ids, mask), {"ids": ids, "more": [mask]}, OrderedDict(a={"b": (mask, ids)})):
        assert batch_size(batch) == 512
    assert batch_size({"text": "abc"}) == batch_size([]) == batch_size(None) == 0


def test_a_step_counts_the_sizes_of_its_batches() -> None:
    stepper = _stepper(_task())
    stepper.spans.step = 7
    batches = _batches(stepper.task, 4)
    for _ in range(2):  # the second time after a roll back
        _run(stepper, batches)
        assert stepper.spans.sizes == {7: sum(x.numel() for x, _ in batches)}


@pytest.mark.parametrize("sharing", [1, 2])
def test_ranks_with_the_same_samples_share_the_size_of_a_batch(sharing: int) -> None:
    """Else the report would find that half of the positions have no loss."""
    task = _task()
    stepper = replace(_stepper(task), sharing=sharing)
    batches = _batches(task, 4)
    _run(stepper, batches)
    assert [*stepper.spans.sizes.values()] == [sum(x.numel() for x, _ in batches) // sharing]


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
    engine = LocalEngine(list(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.0))
    comm = SoloComm()
    buffers = SharedBuffers(model, comm)
    stepper = Stepper(task, model, engine, comm, Precision("fp32", CPU), CPU, 4, 0.0, Spans(), buffers)
    result = stepper.run([(lambda: None, torch.ones(4, 3))] * 3, 1, [0, 0, 0], extra=2)
    assert model.scale.tolist() == [2.0] * 3
    assert (result.loss, result.weight) == (6.0, 4.0) and result.grad_norm == pytest.approx(2 * 3**0.5)
