"""nn.SyncBatchNorm: statistics of the micro-batches of all ranks; one rank with batch norm has the same loss curve."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.errors import ConfigError
from tests.support.gallery import Recorded, record_on_threads
from tests.support.thread_job import train_on_threads

STEPS = 6
TOY = f"--task={Path(__file__).parents[1]}/support/toy.py:toy"


def _task(kind: str, *, sync: bool, momentum: float | None = 0.1) -> Task:
    """A bias before batch norm would have only rounding errors as gradients, which Adam makes large."""
    torch.manual_seed(3)
    first: nn.Module
    norm: nn.Module
    if kind == "images":
        x, first, norm = torch.randn(60, 2, 4, 4), nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5, momentum=momentum)
        model = nn.Sequential(first, norm, nn.ReLU(), nn.Flatten(), nn.Linear(20, 1))
    else:
        x, first = torch.randn(60, 6), nn.Linear(6, 8, bias=False)
        norm = nn.BatchNorm1d(8, affine=kind != "plain", eps=1e-3)
        model = nn.Sequential(first, norm, nn.Tanh(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1))
    if sync:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    data = torch.utils.data.TensorDataset(5 + 3 * x, x.flatten(1).sum(1, keepdim=True))

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[1])

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Task(model, loss, data, data, optimizer=optimizer)


def _train(folder: Path, size: int, micro: int, *options: str, batch: int = 24, **how: Any) -> Recorded:
    task = _task(**how)
    own = (f"--train.global_batch={batch}", f"--train.micro_batch={micro}", f"--train.steps={STEPS}")
    return record_on_threads(
        folder, TOY, *own, "--train.eval_samples=9", *options, size=size, build=lambda rank: copy.deepcopy(task)
    )


def _equal(one: Recorded, other: Recorded) -> None:
    assert other.losses() == pytest.approx(one.losses(), rel=2e-5)
    heldout = [[event["loss"] for event in run.events("evaluation")] for run in (one, other)]
    assert heldout[1] == pytest.approx(heldout[0], rel=2e-5)  # by running statistics
    for name, tensor in one.state().tensors["model"].items():
        torch.testing.assert_close(other.state().tensors["model"][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "batch"), [("vectors", 24), ("images", 20), ("plain", 10)])
@pytest.mark.some(1)
def test_law_1_holds_where_ranks_times_micro_batch_is_equal(kind: str, batch: int, tmp_path: Path) -> None:
    """A last micro-batch may be shorter, or missing on some ranks, which then have no part in statistics."""
    one = _train(tmp_path / "one", 1, 8, batch=batch, kind=kind, sync=False)
    for size, micro in ((1, 8), (2, 4), (8, 1)):
        _equal(one, _train(tmp_path / f"{size}", size, micro, batch=batch, kind=kind, sync=True))


@pytest.mark.parametrize("options", [("--parallel.shard=optimizer",), ("--parallel.shard=gradients",)], ids=["1", "2"])
def test_it_holds_where_state_is_divided_and_with_averages_without_momentum(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    one = _train(tmp_path / "one", 1, 6, kind="images", sync=False, momentum=None)
    _equal(one, _train(tmp_path / "2", 2, 3, *options, kind="images", sync=True, momentum=None))


def test_a_resumed_run_and_the_model_at_its_end_are_as_without(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", 2, 4, kind="vectors", sync=True)
    _train(tmp_path / "parts", 2, 4, "--train.stop_at=3", kind="vectors", sync=True)
    assert _train(tmp_path / "parts", 2, 4, kind="vectors", sync=True).losses() == whole.losses()
    task = _task("vectors", sync=True)
    sizes = ("--train.global_batch=8", "--train.micro_batch=4", "--train.steps=1")
    options = (TOY, *sizes, f"--run_dir={tmp_path / 'run'}")
    for result in train_on_threads(*options, size=2, build=lambda rank: copy.deepcopy(task)):
        assert type(copy.deepcopy(result.model)[1]) is nn.SyncBatchNorm


@pytest.mark.parametrize("options", ["--parallel.sync=local:2 --parallel.workers=2", "--parallel.balance=speed"])
def test_it_is_refused_where_ranks_run_other_passes(options: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nn\.SyncBatchNorm \(1\)"):
        _train(tmp_path / "run", 2, 4, *options.split(), kind="vectors", sync=True)
