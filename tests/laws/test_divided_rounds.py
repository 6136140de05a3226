"""A divided optimizer in elastic jobs: ranks are killed, leave and join, and nothing of it is to be seen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain import Task
from hvdtrain.errors import LostStateError
from hvdtrain.verify.data import verify_data
from tests.laws.test_laws import UNOBSERVED
from tests.laws.test_workers import task_builder
from tests.support.gallery import Recorded
from tests.support.thread_job import Period, train_in_rounds

STEPS = 20


def _task(optimizer: str) -> Any:
    """Of its parameters, rank 1 of 4 owns none."""
    return task_builder(optimizer, width=300, lr=1e-3)


def train_divided(
    folder: Path,
    *plan: Period,
    shard: str = "gradients",
    optimizer: str = "AdamW",
    compression: str = "none",
    build: Callable[[], Task] | None = None,
    more: tuple[str, ...] = (),
) -> Recorded:
    folder.mkdir(exist_ok=True)
    options = ("--train.global_batch=12", "--train.micro_batch=2", f"--train.steps={STEPS}", "--checkpoint.every=5")
    options += (f"--parallel.compression={compression}",)
    options += (f"--parallel.shard={shard}", "--elastic.loss_s=1e9", *UNOBSERVED)
    options += more
    options += ("--memory.offload=optimizer",) if shard == "optimizer" else ()
    train_in_rounds(*options, f"--run_dir={folder / 'run'}", plan=plan, build=build or _task(optimizer))
    return Recorded(folder, 0, "", "")


Alone = Callable[[str], Recorded]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The training of each optimizer on one rank."""
    return cache(lambda name: train_divided(tmp_path_factory.mktemp("one"), Period((0,)), shard="none", optimizer=name))


PLANS = {
    "each rank in turn, to one": (
        Period((0, 1, 2, 3), 7, killed=(1,)),
        Period((0, 2, 3), 7, killed=(0,)),
        Period((2, 3), 7, killed=(3,)),
        Period((2,)),
    ),
    "a loss before the first step of a round, and ranks that join": (
        Period((0, 1, 2), 7, killed=(2,)),
        Period((0, 1, 3), 1, killed=(3,)),
        Period((0, 1, 4, 5)),
    ),
    "ranks that are not neighbours": (Period((0, 1, 2, 3), 12, killed=(1, 3)), Period((0, 2, 4))),
    "ranks leave, neighbours too, and join": (
        Period((0, 1, 2, 3), 3),
        Period((0, 3), 4),
        Period((3, 4, 5), 4),
        Period((5,), 4),
        Period((5, 6)),
    ),
}


@pytest.mark.parametrize(
    ("name", "shard", "optimizer", "compression"),
    [
        *((name, "gradients", "AdamW", "none") for name in PLANS),
        ("each rank in turn, to one", "optimizer", "Adafactor", "none"),
        pytest.param("each rank in turn, to one", "gradients", "Muon", "none", marks=pytest.mark.slow),
        pytest.param("each rank in turn, to one", "gradients", "AdamW", "int8", marks=pytest.mark.slow),
        ("ranks leave, neighbours too, and join", "gradients", "AdamW", "int8"),
    ],
)
@pytest.mark.some(2)
def test_laws_1_and_4(name: str, shard: str, optimizer: str, compression: str, alone: Alone, tmp_path: Path) -> None:
    """Commits are taken with checkpoints, every 5 steps; a killed rank loses the steps since then."""
    rounds = train_divided(tmp_path, *PLANS[name], shard=shard, optimizer=optimizer, compression=compression)
    assert rounds.losses() == pytest.approx(alone(optimizer).losses(), rel=2e-6 if compression == "none" else 2e-3)
    report = verify_data(rounds.run)
    assert not report.wrong and report.last == STEPS
    resumed = rounds.events("resumed")
    assert [line["from"] for line in resumed] == ["memory"] * (len(PLANS[name]) - 1)
    done = 0
    for period, line in zip(PLANS[name], resumed, strict=False):
        newest = done + period.steps - bool(period.killed)
        done = line["step"]
        assert newest // 5 * 5 <= done <= newest if period.killed else done == newest


def test_laws_1_and_4_of_divided_rows(elements: None, alone: Alone, tmp_path: Path) -> None:
    test_laws_1_and_4("each rank in turn, to one", "gradients", "AdamW", "none", alone, tmp_path)


@pytest.mark.parametrize("shard", ["none", "gradients"])
def test_ranks_that_join_get_the_frozen_parameters_of_the_others(shard: str, tmp_path: Path) -> None:
    """Commits leave them out; here, each process makes other ones than rank 0 at the start of the job."""
    make = _task("AdamW")

    def build() -> Task:
        task: Task = make()
        task.model[0].requires_grad_(False)  # type: ignore[operator,index]
        task.model[0].weight.data += 0.1 * int(threading.current_thread().name.removeprefix("worker "))  # type: ignore[operator,index]
        optimizer = torch.optim.AdamW([p for p in task.model.parameters() if p.requires_grad], lr=1e-3)
        return replace(task, optimizer=optimizer, remakes_frozen=True)

    plan = PLANS["a loss before the first step of a round, and ranks that join"]
    rounds = train_divided(tmp_path / "rounds", *plan, shard=shard, build=build)
    one = train_divided(tmp_path / "one", Period((0,)), shard="none", build=build)
    assert rounds.losses() == pytest.approx(one.losses(), rel=2e-6)
    found = rounds.state()
    assert found.values["frozen"] == one.state().values["frozen"] and "0.weight" not in found.tensors["model"]


def test_what_is_lost_with_its_copy_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(LostStateError):
        train_divided(tmp_path / "lost", Period((0, 1, 2, 3), 7, killed=(2, 3)), Period((0, 1)))
