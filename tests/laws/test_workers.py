"""Workers that train apart: what they learn does not depend on the ranks that serve them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.compression.table import parse_outer
from hvdtrain.config.parse import parse_argv
from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.config.sync import OuterPlan, outer_plan
from hvdtrain.data.mixture import sample_order
from hvdtrain.engine.outer import divide
from hvdtrain.engine.periodic import without_workers
from hvdtrain.errors import TaskError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.state.pieces import StateDict
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.report.terminal import to_text
from hvdtrain.timeline.run import load
from hvdtrain.training.start.optimizers import make_optimizer
from hvdtrain.verify.data import verify_data
from tests.laws.test_laws import UNOBSERVED
from tests.support.gallery import Recorded
from tests.support.thread_job import Period, train_in_rounds

STEPS = 24
METHODS = {
    "local": ("--parallel.sync=local:4", "--outer.compression=none"),
    "diloco": ("--parallel.sync=diloco:6", "--outer.start_steps=3", "--outer.compression=none"),
    "diloco, int8": ("--parallel.sync=diloco:6", "--outer.start_steps=3"),
    "streaming": ("--parallel.sync=streaming:8", "--outer.fragments=2", "--outer.delay=3", "--outer.compression=int4"),
    "sparseloco": ("--parallel.sync=sparseloco:4",),
}
QUICK = ("diloco, int8", "streaming")
EVERY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in METHODS]


class _Mean(nn.Module):
    """Tracks the mean of its input in a buffer, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * values.detach().mean()
            self.calls += 1
        return values


class _Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def task_builder(optimizer: str = "AdamW", width: int = 30, lr: float = 1e-2) -> Any:
    torch.manual_seed(3)
    inner = (nn.Linear(6, width), _Mean(), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    model = nn.Sequential(*inner, nn.Linear(width, 1))
    data = torch.utils.data.TensorDataset(torch.randn(60, 6))

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0])[:, 0] - batch[0].sum(1)).square().sum(), len(batch[0])

    def build() -> Task:
        own = copy.deepcopy(model)
        if optimizer == "Muon":
            return Task(own, loss, data, data, optimizer=make_optimizer(own, OptimizerConfig("muon", lr)))
        kind = _Counting if optimizer == "counting" else getattr(torch.optim, optimizer)
        return Task(own, loss, data, data, optimizer=kind(own.parameters(), lr=lr))

    return build


def _train(
    folder: Path, *plan: Period, options: Sequence[str] = (), optimizer: str = "AdamW", build: Any = None
) -> Recorded:
    """Train with 4 workers, one of which has one micro-batch of a step, and the others two."""
    folder.mkdir(exist_ok=True)
    own = ["--train.global_batch=14", "--train.micro_batch=2", f"--train.steps={STEPS}", "--checkpoint.every=8"]
    own += ["--parallel.workers=4", "--elastic.loss_s=1e9", *UNOBSERVED]
    make = build or task_builder(optimizer)
    train_in_rounds(*own, f"--run_dir={folder / 'run'}", *options, plan=plan, build=make)
    return Recorded(folder, 0, "", "")


Alone = Callable[[str], Recorded]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The training of each method on one rank."""
    return cache(lambda method: _train(tmp_path_factory.mktemp("one"), _ranks(1), options=METHODS[method]))


def _close(method: str, ranks: int, values: list[float]) -> Any:
    """Codings round: a sum of gradients in another order may change a code. Without such sums nothing differs."""
    coded = "none" not in METHODS[method][-1]
    sums = ranks > 4 or "--outer.start_steps=3" in METHODS[method]
    return pytest.approx(values, rel=2e-3 if coded and sums else 2e-6)


def _heldout(run: Recorded) -> list[float]:
    return [event["loss"] for event in run.events("evaluation")]


def _ranks(count: int) -> Period:
    return Period(tuple(range(count)))


def _sparsely_weighted() -> Task:
    """Samples of which one in three counts: often a worker has none."""
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(60, 3), (torch.arange(60) % 3 == 0).float())

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return (batch[1] * (model(batch[0])[:, 0] - 1).square()).sum(), batch[1].sum()

    model = nn.Linear(3, 1)
    return Task(model, loss, data, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def test_workers_without_weight_do_not_hold_up_the_others(tmp_path: Path) -> None:
    options = METHODS["local"]
    one = _train(tmp_path / "1", _ranks(1), options=options, build=_sparsely_weighted)
    assert not any(step["skipped"] for step in read_steps(one.run / "journal.jsonl").values())
    assert one.losses()[-1] < one.losses()[0]
    for count in (3, 6):
        other = _train(tmp_path / f"{count}", _ranks(count), options=options, build=_sparsely_weighted)
        assert other.losses() == pytest.approx(one.losses(), rel=2e-6)


@pytest.mark.parametrize("method", EVERY)
def test_the_curve_does_not_depend_on_the_number_of_ranks(method: str, alone: Alone, tmp_path: Path) -> None:
    one = alone(method)
    assert one.losses()[-1] < one.losses()[0] / 2
    for count in (3, 6):
        other = _train(tmp_path / f"{count}", _ranks(count), options=METHODS[method])
        assert other.losses() == _close(method, count, one.losses())
        assert _heldout(other) == _close(method, count, _heldout(one))
        # Buffers, too: but ranks that exchange gradients see other samples, in a group and in synchronous steps.
        if count <= 4 and "--outer.start_steps=3" not in METHODS[method]:
            for name, tensor in one.state().tensors["model"].items():
                assert torch.allclose(other.state().tensors["model"][name].double(), tensor.double(), atol=1e-5)


def _reference(plan: OuterPlan, counts: Sequence[int]) -> list[float]:
    """Return the losses of plain loops with torch's optimizers, one for each worker and one for what they share.

    `counts` of the samples of each worker in a step.
    """
    bounds = [0, *accumulate(counts)]
    task: Task = task_builder()()
    order = sample_order(task.train_data, 60, 0)
    shared = [p.detach().clone() for p in task.model.parameters()]
    models = [copy.deepcopy(task.model) for _ in range(4)]
    inner = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    fragments = divide([tensor.numel() for tensor in shared], plan.fragments)
    outer = [
        torch.optim.SGD([shared[i] for i in each], plan.lr, plan.momentum, nesterov=plan.momentum > 0)
        for each in fragments
    ]
    coding = parse_outer(plan.coding).load()
    residuals: dict[tuple[int, int], Tensor] = {}
    pending: dict[int, tuple[int, list[Tensor]]] = {}
    losses = []

    def exchange(fragment: int, due: int) -> None:
        total = [torch.zeros_like(shared[i]) for i in fragments[fragment]]
        for worker, model in enumerate(models):
            own = [*model.parameters()]
            change = torch.cat([(shared[i] - own[i].detach()).reshape(-1) for i in fragments[fragment]])
            if coding is not None:
                change += plan.feedback * residuals.get((worker, fragment), torch.zeros_like(change))
                payload = torch.zeros(coding.payload_bytes(len(change)), dtype=torch.uint8)
                coding.encode(change, payload)
                sent = torch.zeros_like(change)
                coding.add(payload, sent)
                residuals[worker, fragment] = change - sent
                change = sent
            share = counts[worker] / 14
            for into, part in zip(total, change.split([t.numel() for t in total]), strict=True):
                into += share * part.view(into.shape)
        pending[fragment] = due, total

    def apply(step: int) -> None:
        for fragment in [f for f, (due, _) in pending.items() if due <= step]:
            for i, change in zip(fragments[fragment], pending.pop(fragment)[1], strict=True):
                shared[i].grad = change
            outer[fragment].step()
            for model in models:
                for i, own in enumerate(model.parameters()):
                    if i in fragments[fragment]:
                        own.data = plan.mix * own.data + (1 - plan.mix) * shared[i]

    for step in range(1, STEPS + 1):
        indices = order.indices(np.arange(14 * (step - 1), 14 * step)).tolist()
        sums = 0.0
        for worker, (begin, end) in enumerate(pairwise(bounds)):
            batch = [torch.stack([task.train_data[i][0] for i in indices[begin:end]])]  # type: ignore[index]
            loss, weight = task.loss(models[worker], batch)
            inner[worker].zero_grad()
            (loss / weight).backward()
            nn.utils.clip_grad_norm_(models[worker].parameters(), 1.0)
            inner[worker].step()
            sums += float(loss.detach())
        losses.append(sums / 14)
        apply(step)
        number, rest = divmod(step, plan.interval)
        if not rest and step < STEPS:
            exchange((number - 1) % plan.fragments, step + plan.delay)
            apply(step)
    return losses


@pytest.mark.parametrize("sync", ["local:4", "diloco:6", "streaming:8", "sparseloco:4"])
def test_methods_are_those_of_plain_loops(sync: str, tmp_path: Path) -> None:
    options = (f"--parallel.sync={sync}",)
    found = _train(tmp_path / "run", _ranks(2), options=options)
    plan = outer_plan(parse_argv([*options, "--parallel.workers=4"], None).config)
    assert plan is not None
    assert found.losses() == pytest.approx(_reference(plan, [4, 4, 4, 2]), rel=2e-4)


def test_workers_of_unequal_shares_count_by_their_tokens(tmp_path: Path) -> None:
    options = ("--parallel.sync=diloco:6", "--outer.shares=1,3,2,1", "--outer.compression=none")
    batch = ["--train.global_batch=14", "--train.micro_batch=2", "--parallel.workers=4"]
    plan = outer_plan(parse_argv([*options, *batch], None).config)
    assert plan is not None
    expected = _reference(plan, [2, 6, 4, 2])
    for ranks in (1, 3, 7):
        found = _train(tmp_path / f"{ranks}", _ranks(ranks), options=options)
        assert found.losses() == pytest.approx(expected, rel=2e-4)
        assert not verify_data(found.run).wrong


PLANS = {
    "2, 1, 3 ranks": (Period((0, 1), 2), Period((1,), 2), Period((1, 2, 3))),
    "killed": (Period((0, 1, 2), 3, killed=(1,)), Period((0, 2, 3), 2, killed=(0,)), Period((2, 3))),
    "groups": (Period((0, 1, 2, 3, 4, 5), 3, killed=(1, 4)), Period((0, 2, 3, 5, 6), 2), Period((5, 6))),
}


@pytest.mark.parametrize("method", [pytest.param("diloco", marks=pytest.mark.slow), "streaming", "sparseloco"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.some(2)
def test_ranks_that_are_killed_leave_and_join_change_nothing(
    plan: str, method: str, alone: Alone, tmp_path: Path
) -> None:
    rounds = _train(tmp_path, *PLANS[plan], options=METHODS[method])
    assert rounds.losses() == _close(method, 6 if plan == "groups" else 3, alone(method).losses())
    report = verify_data(rounds.run)
    assert not report.wrong and report.last == STEPS


@pytest.mark.parametrize("method", EVERY)
def test_a_resumed_run_equals_one_that_was_not_stopped(method: str, tmp_path: Path) -> None:
    """It stops within a round, with an exchange under way; other ranks may go on, with the same curve."""
    whole = _train(tmp_path / "whole", _ranks(2), options=METHODS[method])
    for stop, ranks in ((13, 2), (14, 3)):
        folder = tmp_path / f"stopped-{stop}"
        _train(folder, _ranks(2), options=(*METHODS[method], f"--train.stop_at={stop}"))
        resumed = _train(folder, _ranks(ranks), options=METHODS[method])
        if ranks == 2:
            assert resumed.losses() == whole.losses()
            for name, tensor in whole.state().tensors["model"].items():
                assert torch.equal(tensor, resumed.state().tensors["model"][name])
        assert resumed.losses() == _close(method, ranks, whole.losses())


def test_one_step_and_the_mean_is_gradient_averaging(tmp_path: Path) -> None:
    apart = ("--parallel.sync=diloco:1", "--outer.lr=1", "--outer.momentum=0", "--outer.compression=none")
    together = ("--parallel.sync=every_step", "--parallel.workers=null")
    mean, plain = (
        _train(tmp_path / options[0], _ranks(2), options=(*options, "--train.clip=0"), optimizer="SGD")
        for options in (apart, together)
    )
    assert mean.losses() == pytest.approx(plain.losses(), rel=2e-6)


def test_an_optimizer_that_counts_in_its_groups_counts_the_steps_of_a_worker(tmp_path: Path) -> None:
    for count in (1, 4):
        run = _train(tmp_path / f"{count}", _ranks(count), options=METHODS["local"], optimizer="counting")
        assert run.state().values["groups"] == {"0": {"count": STEPS}}


def test_one_optimizer_has_the_mean_of_all_workers() -> None:
    exchange = {f"worker/{w}/optimizer/a/exp_avg": torch.tensor([w, 4.0 * w]) for w in range(3)}
    exchange |= {f"worker/{w}/number/a/steps": torch.tensor(7) for w in range(3)}
    exchange["outer/momentum/0"] = torch.ones(2)
    values = {"exchange": {"workers": 3, "begun": True}, "optimizer": {}}
    found = without_workers(StateDict({"model": {"a": torch.zeros(2)}, "optimizer": {}, "exchange": exchange}, values))
    assert found.tensors["optimizer"]["a/exp_avg"].tolist() == [1.0, 4.0]
    assert found.values == {"exchange": None, "optimizer": {"a/steps": 7}} and "exchange" not in found.tensors


@pytest.mark.parametrize("options", [("--parallel.sync=every_step", "--parallel.workers=null"), METHODS["local"]])
def test_a_run_may_go_on_with_other_workers_or_none(options: Sequence[str], tmp_path: Path) -> None:
    """From the mean state of the optimizers; a run with 4 workers goes on with 3, and back."""
    _train(tmp_path / "run", _ranks(2), options=(*METHODS["diloco"], "--train.stop_at=16"))
    apart = () if "null" in options[-1] else ("--parallel.workers=3",)
    run = _train(tmp_path / "run", _ranks(3), options=(*options, *apart, "--train.stop_at=20"))
    assert any("the checkpoint has 4 workers" in event["text"] for event in run.events("warning"))
    last = _train(tmp_path / "run", _ranks(1), options=METHODS["diloco"])
    assert last.losses()[-1] < last.losses()[0] and len(last.losses()) == STEPS
    assert not verify_data(last.run).wrong
    adam = last.state().tensors["exchange"]["worker/3/optimizer/0.weight/step"]
    assert float(adam) == STEPS


def _with_loss_at(number: int, change: Callable[[Any, Tensor], Tensor]) -> Any:
    """A builder of the task; `change` gets the model and the loss of that pass of training, of 7 passes a step."""
    make, passes = task_builder(), [0]

    def build() -> Task:
        task: Task = make()

        def loss(model: Any, batch: Any) -> Any:
            passes[0] += model.training
            found, weight = task.loss(model, batch)
            return change(model, found) if passes[0] == number else found, weight

        return replace(task, loss=loss)

    return build


def test_a_worker_with_a_gradient_that_is_not_finite_skips_its_step(tmp_path: Path) -> None:
    """The others go on; the step counts as skipped."""
    build = _with_loss_at(31, lambda model, loss: loss + (0 * model[0].weight.sum()).sqrt())  # 0, its derivative is nan
    run = _train(tmp_path, _ranks(1), options=METHODS["local"], build=build)
    steps = read_steps(run.run / "journal.jsonl")
    assert [number for number, step in steps.items() if step["skipped"]] == [5]
    assert np.isfinite([step["loss"] for step in steps.values()]).all()
    assert [event["at_step"] for event in run.events("skipped_step")] == [5]


def test_parameters_that_are_frozen_later_are_refused(tmp_path: Path) -> None:
    """Their changes would stay with each worker."""

    def freeze(model: Any, loss: Tensor) -> Tensor:
        model[0].weight.requires_grad_(False)
        return loss

    with pytest.raises(TaskError, match=r"frozen.* 0\.weight"):
        _train(tmp_path, _ranks(1), options=METHODS["local"], build=_with_loss_at(30, freeze))


def test_the_report_has_the_outer_steps(tmp_path: Path) -> None:
    """Of 24 steps, 3 are synchronous; then there is one after 6 steps each, and at the end."""
    found = _train(tmp_path, _ranks(2), options=(*METHODS["diloco, int8"], "--observe.timeline=auto"))
    events = found.events("outer_step")
    assert [event["at_step"] for event in events] == [9, 15, 21, 24]
    # Evaluations are due after every 8 steps; the shared parameters have gained these steps only later.
    assert [event["at_step"] for event in found.events("evaluation")] == [0, 9, 21, 24]
    assert all(len(event["cosines"]) == len(event["change_norms"]) == 4 for event in events)
    assert all(-1 <= cosine <= 1 for event in events for cosine in event["cosines"])
    analysis = analyse(load(found.run))
    # How many of the first steps are warm-up depends on their times, but never more than a quarter.
    assert analysis.budget is not None and 3 * STEPS // 4 <= analysis.budget.steps < STEPS
    outer = analysis.outer
    assert outer is not None and (outer.sync, outer.workers, outer.count) == ("diloco:6", 4, 4)
    assert outer.sent_bytes == 2 * parse_outer("int8").payload_bytes(1171)  # of two workers, to one other rank
    assert 0 < outer.cosine <= 1 and outer.drift > 0
    assert "4 workers, diloco:6: 4 outer steps" in to_text(analysis)
