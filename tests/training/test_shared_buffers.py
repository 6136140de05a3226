"""Buffers that ranks write differently are equal on all ranks after every step, or end the run; ranks are threads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain import Task
from hvdtrain.errors import DriftError
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.train_state import Progress, TrainState
from hvdtrain.training.diagnostics.drift import Drift
from hvdtrain.training.loop.shared_buffers import Policy, SharedBuffers
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.thread_job import train_on_threads

OPTIONS = ("--train.global_batch=5", "--train.micro_batch=1", "--train.steps=8", "--train.check_every=3")


class Writes(nn.Module):
    """Statistics, a sum that is written from a later step on, a number of samples, a cache and a constant."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=0.5)
        self.line = nn.Linear(2, 1)
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("flag", torch.tensor([True]))
        self.register_buffer("largest", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.passes, self.late = 0, late

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.training and (not self.late or self.passes > 8):
            self.total += x.double().sum()
            self.largest = torch.maximum(self.largest, x.max().mul(100).long())
        self.cache += x.sum()
        return self.line(self.norm(x).mean((2, 3)))


def _task(_rank: int, *, late: bool = False) -> Task:
    torch.manual_seed(1)
    model = Writes(late=late)

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, float]:
        return model(batch[0]).pow(2).sum(), float(len(batch[0]))

    return Task(model, loss, TensorDataset(torch.randn(40, 2, 3, 3)))


def _trained(folder: Path, *options: str, size: int, late: bool = False) -> list[dict[str, Tensor]]:
    found = train_on_threads(*OPTIONS, f"--run_dir={folder}", *options, size=size, build=partial(_task, late=late))
    return [result.model.state_dict() for result in found]


@pytest.mark.parametrize(
    ("size", "policy", "late"), [(2, "mean", False), (3, "broadcast", False), (3, "mean", True), (2, "broadcast", True)]
)
def test_replicas_hold_equal_buffers(size: int, policy: str, late: bool, tmp_path: Path) -> None:
    """Also those that begin to differ later, and as a checkpoint holds them; a resumed run makes the same ones."""
    option = f"--parallel.buffers={policy}"
    whole = _trained(tmp_path / "whole", option, size=size, late=late)
    assert whole[0]["total"].count_nonzero() and whole[0]["largest"].count_nonzero()
    _, checkpoint = CheckpointStore(tmp_path / "whole/checkpoints", pytest.fail).load_newest()  # type: ignore[misc]
    saved = checkpoint.tensors["model"]
    for rank in whole:
        assert all(torch.equal(rank[name], whole[0][name]) and torch.equal(rank[name], saved[name]) for name in saved)
    if not late:
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


def _step(buffers: SharedBuffers, count: int = 1, *, applied: bool = True) -> None:
    buffers.start(count)
    buffers.finish(applied=applied)


@pytest.mark.parametrize(("policy", "expected"), [("mean", [2.5, 0.0, 1.0]), ("broadcast", [0.0, 0.0, 1.0])])
def test_the_mean_is_over_micro_batches_and_numbers_that_are_not_floating_come_from_rank_0(
    policy: Policy, expected: list[float]
) -> None:
    def body(comm: ThreadComm) -> list[float]:
        model = Held(comm.rank)
        _step(SharedBuffers(model, comm, policy), [3, 1, 0][comm.rank])
        return model.values()

    assert on_ranks(3, body) == [expected] * 3


def test_a_step_that_is_not_applied_shares_nothing() -> None:
    def body(comm: ThreadComm) -> list[float]:
        model = Held(comm.rank)
        buffers = SharedBuffers(model, comm)
        _step(buffers, applied=False)
        assert model.values() == [10.0 * comm.rank, 10.0 * comm.rank, 1.0]
        _step(buffers)
        model.narrow += comm.rank
        _step(buffers, applied=False)
        return model.values()

    assert on_ranks(2, body) == [[5.0, 0.0, 1.0], [6.0, 0.0, 1.0]]


def test_buffers_that_drift_later_are_shared_from_then_on() -> None:
    def body(comm: ThreadComm) -> list[float]:
        model = Held(comm.rank)
        buffers = SharedBuffers(model, comm)
        _step(buffers)
        model.constant += comm.rank
        _step(buffers)
        assert model.values()[-1] == 1.0 + comm.rank
        state = TrainState(model, torch.optim.SGD([torch.zeros(1)]), None, Progress(), None)  # type: ignore[arg-type]
        Drift(state, comm, 1, buffers.share, pytest.fail).on_sums(3, [1, 1])
        assert model.values()[-1] == 1.5
        for buffer in model.buffers():
            buffer += 2 * comm.rank
        _step(buffers)
        return model.values()

    assert on_ranks(2, body) == [[6.0, 0.0, 2.5]] * 2
