"""A step that is not applied leaves no trace in buffers; those that ranks write differently become equal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain.engine.make import make_engine
from hvdtrain.errors import DriftError
from hvdtrain.plan.plan import Plan
from hvdtrain.spans import Spans
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.task.base import Task
from hvdtrain.training.diagnostics.drift import Drift
from hvdtrain.training.loop import buffers
from hvdtrain.training.loop.buffers import Rollback, all_buffers, copy_to_host
from hvdtrain.training.loop.forward import Precision
from hvdtrain.training.loop.shared_buffers import Policy, SharedBuffers
from hvdtrain.training.loop.step import Stepper
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads

CPU = torch.device("cpu")


class Counts(nn.Module):
    """Writes what it keeps of its input in every way there is, and holds what it does not write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3).eval()
        self.line = nn.Linear(3, 1)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("constant", torch.tensor([math.nan, 1.0]))
        self.register_buffer("nothing", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().max())  # another tensor
        self.cache += 1
        return self.line(self.frozen(self.norm(x))).squeeze(-1)


def _loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return (model(x) ** 2).sum(), len(x)


def _saved(model: nn.Module) -> dict[str, Tensor]:
    own = dict(model.named_parameters())
    return {name: value.clone() for name, value in model.state_dict().items() if name not in own}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n].nan_to_num(7), b[n].nan_to_num(7)) for n in a)


def _steps(comm: ThreadComm, bad: list[bool], idle: int = 0) -> list[tuple[bool, bool]]:
    """Steps of this rank, the last rank's spoilt where `bad`: whether each was applied, and changed a buffer.

    The last `idle` ranks have no micro-batch.
    """
    model = Counts()
    inputs = torch.rand(len(bad), 2, 4, 3) + torch.arange(len(bad)).reshape(-1, 1, 1, 1)
    engine = make_engine(torch.optim.SGD(model.parameters(), lr=1e-3), model, comm, Plan(), Spans())
    parts, task = [SharedBuffers(model, comm), Rollback(model)], Task(model, _loss, [])
    batch = 8 * comm.size
    stepper = Stepper(task, model, engine, comm, Precision("fp32", CPU), CPU, batch, 0.0, Spans(), parts)
    found = []
    for x, spoilt in zip(inputs, bad, strict=True):
        if spoilt and comm.rank == comm.size - idle - 1:
            x[1, 0, 0] = math.nan
        batches: list[Any] = [] if comm.rank >= comm.size - idle else [(lambda: None, part) for part in x]
        before = _saved(model)
        result = stepper.run(batches, len(batches), [])
        found.append((result.applied, not _same(before, _saved(model))))
    assert all(bool(value.isfinite().all()) for name, value in _saved(model).items() if name != "constant")
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("bad", [[True, False, False], [False, True, False, True]])
def test_a_skipped_step_changes_no_buffer_on_any_rank(size: int, bad: list[bool]) -> None:
    for found in on_ranks(size, lambda comm: _steps(comm, bad)):
        assert found == [(not spoilt, not spoilt) for spoilt in bad]


def test_an_idle_rank_takes_the_buffers_of_the_others() -> None:
    working, idle = on_ranks(2, lambda comm: _steps(comm, [True, False, True], idle=1))
    assert working == [(False, False), (True, True), (False, False)]
    assert [changed for _, changed in idle] == [False, True, False]


def _two_steps(model: nn.Module, x: Tensor, *, applied: bool) -> None:
    rollback = Rollback(model)
    for _ in range(2):
        rollback.begin(1)
        model(x)
        rollback.finish(1, applied=applied)


def test_after_the_first_step_only_written_buffers_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(buffers, "_copy_on_device", lambda places: copied.extend(name for _, name in places) or [])
    _two_steps(Counts(), torch.ones(2, 3), applied=True)
    statistics = ["running_mean", "running_var", "num_batches_tracked"]
    assert sorted(copied) == sorted(["largest", *statistics, *statistics])  # the frozen ones too: they may thaw
    plain = nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))
    plain.register_buffer("mask", torch.ones(2))
    copied.clear()
    _two_steps(plain, torch.ones(2, 2), applied=False)
    assert copied == []


def test_a_cache_that_no_checkpoint_holds_stays_as_it_is() -> None:
    model = Counts()
    _two_steps(model, torch.ones(2, 3), applied=False)
    assert model.cache.item() == 2.0
    assert model.largest.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_buffers_of_any_dtype_are_compared_and_restored(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.register_buffer("value", torch.ones(2, 3).to(dtype).t())
    (copy,) = copy_to_host(all_buffers(model))
    assert not copy.is_changed()
    with torch.no_grad():
        model.value.zero_()
    assert copy.is_changed()
    copy.restore()
    assert not copy.is_changed()


OPTIONS = ("--train.global_batch=5", "--train.micro_batch=1", "--train.steps=8", "--train.check_every=3")


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=0.5)
        self.line = nn.Linear(2, 1)
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("flag", torch.tensor([True]))
        self.register_buffer("largest", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += x.double().sum()
            self.largest = torch.maximum(self.largest, x.max().mul(100).long())
        self.cache += x.sum()
        return self.line(self.norm(x).mean((2, 3)))


def _writes(_rank: int) -> Task:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(40, 2, 3, 3))
    return Task(Writes(), lambda model, batch: (model(batch[0]).pow(2).sum(), len(batch[0])), data)


def _trained(folder: Path, *options: str, size: int) -> list[dict[str, Tensor]]:
    found = train_on_threads(*OPTIONS, f"--run_dir={folder}", *options, size=size, build=_writes)
    return [result.model.state_dict() for result in found]


@pytest.mark.parametrize(("size", "policy"), [(2, "mean"), (3, "broadcast")])
def test_replicas_hold_equal_buffers(size: int, policy: str, tmp_path: Path) -> None:
    """As a checkpoint holds them; a resumed run makes the same ones."""
    option = f"--parallel.buffers={policy}"
    whole = _trained(tmp_path / "whole", option, size=size)
    assert whole[0]["total"].count_nonzero() and whole[0]["largest"].count_nonzero()
    _, checkpoint = CheckpointStore(tmp_path / "whole/checkpoints", pytest.fail).load_newest()  # type: ignore[misc]
    saved = checkpoint.tensors["model"]
    for rank in whole:
        assert all(torch.equal(rank[name], whole[0][name]) and torch.equal(rank[name], saved[name]) for name in saved)
    _trained(tmp_path / "half", option, "--train.stop_at=4", size=size)
    resumed = _trained(tmp_path / "half", option, size=size)
    assert all(torch.equal(resumed[0][name], whole[0][name]) for name in saved)


def test_with_check_differing_buffers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DriftError, match=r"buffers are not equal on all ranks: total, largest, .* on rank\(s\) 1"):
        _trained(tmp_path, "--parallel.buffers=check", size=2)


class Held(nn.Module):
    """Numbers of a rank, and one that is equal."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("narrow", torch.full((1,), 10.0 * rank, dtype=torch.float16))
        self.register_buffer("whole", torch.full((1,), 10 * rank))
        self.register_buffer("constant", torch.ones(1))

    def values(self) -> list[float]:
        return [float(buffer) for buffer in self.buffers()]


def _share(buffers: SharedBuffers, count: int = 1, *, applied: bool = True) -> None:
    buffers.begin(count)
    buffers.start()
    buffers.finish(1, applied=applied)


@pytest.mark.parametrize(("policy", "expected"), [("mean", [2.5, 0.0, 1.0]), ("broadcast", [0.0, 0.0, 1.0])])
def test_the_mean_is_over_micro_batches_and_numbers_that_are_not_floating_come_from_rank_0(
    policy: Policy, expected: list[float]
) -> None:
    def body(comm: ThreadComm) -> list[float]:
        model = Held(comm.rank)
        _share(SharedBuffers(model, comm, policy), [3, 1, 0][comm.rank])
        return model.values()

    assert on_ranks(3, body) == [expected] * 3


def test_a_step_that_is_not_applied_shares_nothing() -> None:
    def body(comm: ThreadComm) -> list[float]:
        model = Held(comm.rank)
        buffers = SharedBuffers(model, comm)
        _share(buffers, applied=False)
        assert model.values() == [10.0 * comm.rank, 10.0 * comm.rank, 1.0]
        _share(buffers)
        model.narrow += comm.rank
        _share(buffers, applied=False)
        return model.values()

    assert on_ranks(2, body) == [[5.0, 0.0, 1.0], [6.0, 0.0, 1.0]]


def test_buffers_that_drift_later_are_shared_from_then_on() -> None:
    def body(comm: ThreadComm) -> list[float]:
        model = Held(comm.rank)
        buffers = SharedBuffers(model, comm)
        _share(buffers)
        model.constant += comm.rank
        _share(buffers)
        assert model.values()[-1] == 1.0 + comm.rank
        state = TrainState(model, torch.optim.SGD([torch.zeros(1)]), None, Progress(), None)  # type: ignore[arg-type]
        Drift(state, comm, 1, buffers.share, pytest.fail).on_sums(3, [1, 1])
        assert model.values()[-1] == 1.5
        for buffer in model.buffers():
            buffer += 2 * comm.rank
        _share(buffers)
        return model.values()

    assert on_ranks(2, body) == [[6.0, 0.0, 2.5]] * 2
