"""A divided optimizer whose gradients and parameters are sent compressed: nothing is lost, and ranks stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.engine.among_copies import AmongCopies
from hvdtrain.engine.make import make_engine
from hvdtrain.plan.plan import Plan
from hvdtrain.state.snapshot import Commits
from hvdtrain.state.train_state import Progress, TrainState
from tests.laws.test_laws import check_same, record
from tests.support.gallery import LANGUAGE, TOY, Recorded
from tests.support.thread_comm import ThreadComm, per_rank
from tests.support.toy import toy

NAMES = ["bf16", "fp16", "int8"]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(tmp_path_factory.mktemp("exact"), *LANGUAGE, size=2)


@pytest.mark.parametrize(
    ("compression", "shard", "precision"),
    [*((name, "optimizer", "fp32") for name in NAMES), ("int8", "gradients", "fp16"), ("fp16", "gradients", "fp16")],
)
@pytest.mark.some(2)
def test_the_curve_is_near_that_without_compression(
    compression: str, shard: str, precision: str, exact: Recorded, tmp_path: Path
) -> None:
    """Every checkpoint compares the parameters of the ranks."""
    options = (f"--parallel.shard={shard}", f"--parallel.compression={compression}", f"--precision={precision}")
    found = record(tmp_path, *LANGUAGE, *options, "--train.check_every=1", size=2)
    assert found.losses() != exact.losses()
    assert found.losses() == pytest.approx(exact.losses(), rel=2e-3)


@pytest.mark.parametrize(("compression", "size"), [*((name, 2) for name in NAMES), ("int8", 3)])
@pytest.mark.some(1)
def test_law_2_against_a_run_without_a_save(compression: str, size: int, tmp_path: Path) -> None:
    options = (*LANGUAGE, "--parallel.shard=gradients", f"--parallel.compression={compression}", "--checkpoint.every=3")
    whole = record(tmp_path / "whole", *options, "--checkpoint.every=0", size=size)
    for stop in (3, 8):
        parts = record(tmp_path / "parts", *options, f"--train.stop_at={stop}", size=size)
    assert parts.losses() == whole.losses()
    check_same(parts.state(), whole.state())
    assert not any(name.endswith("/master") for name in whole.state().tensors.get("exchange", {}))


def test_the_programs_model_is_exact_at_the_end(tmp_path: Path) -> None:
    """In training it has rounded values, which the checkpoint keeps apart."""
    models: list[nn.Module] = []

    def build(rank: int) -> Task:
        models.append((task := toy()).model)
        return task

    options = ("--parallel.shard=optimizer", "--parallel.compression=bf16", "--train.steps=4")
    saved = record(tmp_path, *TOY[1:], *options, size=2, build=build).state().tensors
    for name, exact in saved["model"].items():
        assert all(torch.equal(model.state_dict()[name], exact) for model in models)
    assert not torch.equal(saved["exchange"]["layers.0.weight/rounded"], saved["model"]["layers.0.weight"])


@pytest.mark.parametrize("by", ["rows", pytest.param("elements", marks=pytest.mark.slow)])
def test_any_division_and_compression_resumes(
    by: str, exact: Recorded, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Replicated with int8, divided with int8, 3 ranks with bf16, one rank, divided without compression."""
    if by == "elements":
        request.getfixturevalue(by)
    shard, coded = "--parallel.shard=optimizer", "--parallel.compression={}".format
    stages = ((2, 2, (coded("int8"),)), (2, 4, (shard, coded("int8"))), (3, 5, (shard, coded("bf16"))), (1, 6, ()))
    for size, stop, options in (*stages, (2, 8, (shard,))):
        found = record(tmp_path, *LANGUAGE, *options, f"--train.stop_at={stop}", size=size)
    assert found.losses() == pytest.approx(exact.losses(), rel=2e-3)


class Two(nn.Module):
    """A tensor that both ranks own, and one that one rank owns."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.left = nn.Parameter(torch.randn(700, 300, generator=generator))
        self.right = nn.Parameter(torch.randn(33, generator=generator))


class Rank:
    """One rank of a training loop with given gradients, by an engine alone; each step adds the mean gradient."""

    def __init__(self, comm: ThreadComm, compression: str, *, passes: int = 1) -> None:
        self.comm, self.passes, self.model = comm, passes, Two()
        named = list(self.model.named_parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        shard = "gradients" if passes > 1 else "optimizer"
        made = make_engine(self.optimizer, self.model, comm, Plan(compression=compression, bucket_mib=1.0, shard=shard))
        assert isinstance(made.sums, AmongCopies)
        self.engine = made
        scaler = torch.amp.GradScaler(enabled=False)
        self.state = TrainState(self.model, self.optimizer, scaler, Progress(), exchange=self.engine)
        self.given = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named}

    def gradients(self, number: int, by: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 * number + by)
        return [torch.randn(p.shape, generator=generator) for p in self.model.parameters()]

    def step(self, number: int, *, applied: bool = True, finite: bool = True) -> None:
        """A step that may be skipped, or has a gradient on rank 1 that is not finite."""
        engine, applied = self.engine, applied and finite
        engine.begin(self.passes)
        for turn in range(self.passes):
            every = [self.gradients(number + 50 * turn, rank) for rank in range(self.comm.size)]
            if not finite and self.comm.rank == 1 and not turn:
                every[1][1].fill_(torch.inf)  # one rank owns this parameter
            loss: Any = sum((p * g).sum() for p, g in self.used(every[self.comm.rank]))
            engine.backward(loss)
            for mine in every if applied else ():
                for (name, p), g in zip(self.model.named_parameters(), mine, strict=True):
                    self.given[name] += g * p.requires_grad
        assert bool(engine.norm(engine.finish()).isfinite()) == finite
        if applied:
            engine.step()
        engine.commit(applied=applied)
        engine.complete()

    def used(self, gradients: list[Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, g) for p, g in zip(self.model.parameters(), gradients, strict=True) if p.requires_grad]

    def exact(self) -> dict[str, Tensor]:
        """What all ranks own, in whole."""
        found = {name: torch.zeros(p.shape) for name, p in self.model.named_parameters()}
        for name, own in self.engine.owned().items():
            if own.parameter is not None:
                own.cut(found[name]).copy_(own.parameter.detach())
            self.comm.allreduce(found[name], name=f"test/{name}").wait()
        return found

    def residuals(self) -> dict[str, Tensor]:
        """What is still to be delivered, summed over ranks."""
        kept = self.engine.state_dict()[0]
        return {
            name: self.comm.allreduce(
                kept.get(f"{name}/residual", torch.zeros(p.shape)).double().clone(), name=f"test/{name}"
            ).wait()
            for name, p in self.model.named_parameters()
        }


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("compression", "size"), [("int8", 2), ("int8", 3), ("fp16", 2)])
@per_rank()
def test_what_was_given_is_delivered_or_a_residual(comm: ThreadComm, compression: str, size: int, passes: int) -> None:
    """Also where parameters are frozen for some steps, a step is skipped, and one is not finite."""
    rank = Rank(comm, compression, passes=passes)
    start = {name: p.detach().clone() for name, p in rank.model.named_parameters()}
    for number in range(9):
        rank.model.right.requires_grad_(number not in (3, 4))
        rank.model.left.requires_grad_(number != 6)
        rank.step(number, applied=number != 5, finite=number != 7)
    exact, residuals = rank.exact(), rank.residuals()
    for name, parameter in rank.model.named_parameters():
        assert (residuals[name].abs().max() > 0) == (compression == "int8")
        delivered = (start[name] - exact[name]).double()
        atol = 1e-4 if compression == "int8" else 2e-2
        torch.testing.assert_close(delivered, rank.given[name] - residuals[name], rtol=1e-5, atol=atol)
        lag = (parameter.detach() - exact[name]).abs().max()
        assert 0 < lag < 0.1 * (start[name] - exact[name]).abs().max()
    rank.engine.residuals.synchronize_state()
    assert all(torch.equal(p.detach(), exact[name]) for name, p in rank.model.named_parameters())
    for name, residual in rank.residuals().items():
        torch.testing.assert_close(residual, residuals[name], rtol=1e-5, atol=1e-5)
    rank.engine.residuals.rescale(0.5)
    for name, residual in rank.residuals().items():
        torch.testing.assert_close(residual, residuals[name] / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compression", NAMES)
@per_rank(2)
def test_a_commit_changes_nothing_and_is_restored_bit_for_bit(comm: ThreadComm, compression: str) -> None:
    rank, undisturbed = Rank(comm, compression), Rank(comm, compression)
    commits = Commits(1.0)
    for number in range(5):
        if number == 2:
            commits.commit(rank.state)
            model = {name: tensor.clone() for name, tensor in rank.model.state_dict().items()}
            exact, residuals = rank.exact(), rank.residuals()
        rank.step(number)
        undisturbed.step(number)
    _equal_tensors(rank.model.state_dict(), undisturbed.model.state_dict())
    _equal_tensors(rank.exact(), undisturbed.exact())
    commits.restore(rank.state)
    _equal_tensors(rank.model.state_dict(), model)
    _equal_tensors(rank.exact(), exact)
    for name, residual in rank.residuals().items():
        torch.testing.assert_close(residual, residuals[name], rtol=1e-5, atol=1e-5)
    for number in range(2, 5):
        rank.step(number)
    if compression != "int8":  # whose residuals are evened out over the ranks
        _equal_tensors(rank.model.state_dict(), undisturbed.model.state_dict())
    whole = {f"{name}/master": tensor for name, tensor in exact.items()}  # as after another division
    rank.engine.load_state_dict(whole, {"plan": None, "ranks": 3, "inexact": True})
    _equal_tensors(rank.exact(), exact)


def _equal_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@per_rank(2)
def test_residuals_of_frozen_parameters_are_kept_after_a_resume(comm: ThreadComm) -> None:
    """Parameters that the first step does not train get theirs when they are freed; any engine."""
    rank = Rank(comm, "bf16")
    waiting = torch.full((33,), 4.0)
    rank.engine.load_state_dict({"right/residual": waiting}, {"plan": None, "ranks": 2})
    rank.model.right.requires_grad_(False)
    rank.step(0)
    assert torch.equal(rank.engine.state_dict()[0]["right/residual"], waiting)
    rank.model.right.requires_grad_(True)
    start = rank.exact()["right"]
    rank.step(1)
    summed = sum(rank.gradients(1, by)[1] for by in range(2)) + 8.0
    torch.testing.assert_close(start - rank.exact()["right"], summed, rtol=1e-2, atol=5e-2)
    assert "right/residual" not in rank.engine.state_dict()[0]
