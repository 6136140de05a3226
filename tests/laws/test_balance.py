"""Shares of the global batch by the speed of ranks: the loss curve stays, and each sample is used once."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.data.loader import Stream
from hvdtrain.data.order import sample_indices
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.task.base import Task
from hvdtrain.training.loop.balance import Balance, make_balance, speed_shares
from hvdtrain.verify.data import verify_data
from tests.laws.test_laws import UNOBSERVED
from tests.laws.test_workers import task_builder
from tests.support.gallery import Recorded
from tests.support.thread_job import Period, train_in_rounds

STEPS = 48
TURNS_AT = 16
"""The step from which the other rank is slow."""


@pytest.mark.parametrize(
    ("pass_s", "count", "expected"),
    [
        ([1, 1], 8, [4, 4]),
        ([1, 2], 9, [6, 3]),
        ([2, 1, 1], 5, [1, 2, 2]),
        ([1, 1, 100], 16, [8, 7, 1]),
        ([3, 1], 2, [1, 1]),
        ([1e-6, 5e-6, 2e-6], 17, [10, 2, 5]),
    ],
)
def test_the_slowest_rank_is_done_first(pass_s: list[float], count: int, expected: list[int]) -> None:
    assert speed_shares(pass_s, count) == expected


def test_small_differences_change_nothing() -> None:
    """The shares of 16 micro-batches stay if the slowest rank would gain less than 5%."""
    begun: list[str] = []
    stream = Stream([0] * 99, 0, 16, 1, 0, 2)  # type: ignore[arg-type]
    feed: Any = SimpleNamespace(stream=stream, begin=lambda progress, stop, why: begun.append(why))
    progress = SimpleNamespace(step=8, skipped_in_row=0)
    state = SimpleNamespace(progress=progress)
    recorder = SimpleNamespace(event=lambda record: None)
    current: Any = SimpleNamespace(worker=SimpleNamespace(state=state), stop=99, recorder=recorder)
    balance = Balance(current, feed, lambda line: None)
    for sums in ([100, 118], [0, 250], [100, 100]):
        balance.on_sums(8, sums)
        assert not begun and feed.stream.shares is None
    progress.skipped_in_row = 1  # each rank looks for the cause in its own micro-batches
    balance.on_sums(8, [100, 160])
    assert not begun
    progress.skipped_in_row = 0
    balance.on_sums(8, [100, 160])
    assert begun == ["balanced"] and feed.stream.shares == (10, 6)


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0.5), ("cuda", 0.25)])
def test_reading_data_is_work_of_a_rank_unless_a_gpu_computes_meanwhile(device: str, expected: float) -> None:
    state = SimpleNamespace(progress=SimpleNamespace(step=7))
    worker = SimpleNamespace(state=state, device=torch.device(device))
    current: Any = SimpleNamespace(worker=worker, comm=SimpleNamespace(rank=1, size=2))
    balance = Balance(current, Any, lambda line: None)  # type: ignore[arg-type]
    for _ in range(8):
        balance.add_step({"data": 1.0, "forward": 0.6, "backward": 0.4, "wait": 9.0}, 4)
    assert balance.values() == [0, 1e6 * expected]


@pytest.mark.parametrize(
    ("global_batch", "advice"), [(3, "--train.micro_batch 1"), (1, "a larger --train.global_batch")]
)
def test_too_few_micro_batches_are_refused_or_reported_in_an_elastic_job(global_batch: int, advice: str) -> None:
    warnings: list[str] = []
    current: Any = SimpleNamespace(
        worker=SimpleNamespace(plan=Plan(balance="speed")),
        comm=SimpleNamespace(size=2),
        rounds=SimpleNamespace(elastic=True),
        recorder=SimpleNamespace(warn=warnings.append, say=print),
    )
    feed: Any = SimpleNamespace(stream=Stream([0] * 99, 0, 2 * global_batch - 1, 2, 0, 2))  # type: ignore[arg-type]
    assert make_balance(current, feed) is not None
    assert advice in warnings[0]
    current.rounds.elastic = False
    with pytest.raises(ConfigError, match="little to divide") as caught:
        make_balance(current, feed)
    assert advice in str(caught.value.next_step)
    feed.stream = replace(feed.stream, global_batch=8)
    assert make_balance(current, feed) is not None and len(warnings) == 1
    current.worker.plan = Plan()
    assert make_balance(current, feed) is None


@pytest.fixture
def recorded_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a micro-batch: worker 1 needs four times as long until `TURNS_AT`, and then worker 0 does."""
    add_step = Balance.add_step

    def recorded(self: Balance, seconds: Any, passes: int) -> None:
        is_late = self.current.worker.state.progress.step >= TURNS_AT
        name = threading.current_thread().name
        add_step(self, {"forward": passes * (4e-3 if (name == "worker 1") != is_late else 1e-3)}, passes)

    monkeypatch.setattr(Balance, "add_step", recorded)


def _train(folder: Path, *options: str, plan: tuple[Period, ...] = (Period((0, 1)),), make: Any = None) -> Recorded:
    own = ["--train.global_batch=16", "--train.micro_batch=1", f"--train.steps={STEPS}", "--checkpoint.every=16"]
    own += [*UNOBSERVED, "--elastic.loss_s=1e9", f"--run_dir={folder / 'run'}"]
    train_in_rounds(*own, *options, plan=plan, build=make or task_builder())
    return Recorded(folder, 0, "", "")


@pytest.mark.usefixtures("recorded_speed")
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_the_curve_stays_while_shares_follow_the_speed(shard: str, tmp_path: Path) -> None:
    equal = _train(tmp_path / "equal", "--train.steps=26")
    speed = _train(tmp_path / "speed", "--train.steps=26", "--parallel.balance=speed", f"--parallel.shard={shard}")
    assert not equal.events("shares")
    assert speed.losses() == pytest.approx(equal.losses(), rel=1e-6, abs=1e-6)
    assert [event["shares"] for event in speed.events("shares")] == [[13, 3], [3, 13]]
    report = verify_data(speed.run)
    assert not report.wrong and report.last == 26


@pytest.mark.slow
@pytest.mark.usefixtures("recorded_speed")
def test_ranks_may_change_with_shares_by_speed(tmp_path: Path) -> None:
    plan = (Period((0, 1, 2), 20, killed=(2,)), Period((0, 1), 12), Period((0, 1, 3)))
    speed = _train(tmp_path / "speed", "--parallel.balance=speed", plan=plan)
    assert speed.losses() == pytest.approx(_train(tmp_path / "equal").losses(), rel=1e-6, abs=1e-6)
    assert len({len(event["shares"]) for event in speed.events("shares")}) == 2
    assert not verify_data(speed.run).wrong


@pytest.mark.slow
@pytest.mark.usefixtures("recorded_speed")
def test_a_roll_back_keeps_shares_by_speed_and_the_ledger(tmp_path: Path) -> None:
    options = ("--elastic.roll_back=both", "--elastic.loss_s=0")
    samples = torch.randn(1000, 6, generator=torch.Generator().manual_seed(1))
    samples[sample_indices(np.array([600]), 1000, 0)] *= 1e9  # its loss jumps in step 38
    data = torch.utils.data.TensorDataset(samples)
    build = task_builder()

    def make() -> Task:
        return replace(build(), train_data=data)

    equal = _train(tmp_path / "equal", *options, make=make)
    speed = _train(tmp_path / "speed", "--parallel.balance=speed", *options, make=make)
    assert [event["positions"] for event in speed.events("rolled_back")] == [[592, 608]]
    assert speed.events("shares")
    assert speed.losses() == pytest.approx(equal.losses(), rel=1e-6, abs=1e-6)
    report = verify_data(speed.run)
    assert not report.wrong and report.left_out == [(592, 608)]
