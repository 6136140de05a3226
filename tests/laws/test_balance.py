"""Shares of the global batch by the speed of ranks: the loss curve stays, and each sample is used once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.data.loader import Stream
from hvdtrain.task.base import Task
from hvdtrain.training.loop.balance import Balance, speed_shares
from hvdtrain.verify.data import verify_data
from tests.laws.test_workers import task_builder
from tests.support.gallery import Recorded
from tests.support.thread_rounds import Period, train_in_rounds

STEPS = 48
TURNS_AT = 24
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
    found = speed_shares(pass_s, count)
    assert found == expected and sum(found) == count
    slowest = max(s * n for s, n in zip(pass_s, found, strict=True))
    for giver in range(len(found)):  # no move of one micro-batch makes it faster
        for taker in range(len(found)):
            moved = [n - (r == giver) + (r == taker) for r, n in enumerate(found)]
            if giver != taker and min(moved) >= 1:
                assert max(s * n for s, n in zip(pass_s, moved, strict=True)) >= slowest


def test_small_differences_change_nothing() -> None:
    """The shares of 16 micro-batches stay if the slowest rank would gain less than 5%."""
    begun: list[str] = []
    stream = Stream([0] * 99, 0, 16, 1, 0, 2)  # type: ignore[arg-type]
    feed: Any = SimpleNamespace(stream=stream, begin=lambda progress, stop, why: begun.append(why))
    state = SimpleNamespace(progress=SimpleNamespace(step=8))
    recorder = SimpleNamespace(event=lambda record: None)
    current: Any = SimpleNamespace(worker=SimpleNamespace(state=state), stop=99, recorder=recorder)
    balance = Balance(current, feed, lambda line: None)
    for sums in ([100, 118], [0, 250], [100, 100]):
        balance.on_sums(8, sums)
        assert not begun and feed.stream.shares is None
    balance.on_sums(8, [100, 160])
    assert begun == ["balanced"] and feed.stream.shares == (10, 6)


def _train(folder: Path, *options: str, plan: tuple[Period, ...] = (Period((0, 1)),)) -> Recorded:
    """Train; worker 1 is slow in the first half of the passes, and worker 0 in the other."""
    folder.mkdir()
    make, seen = task_builder(), Counter[str]()

    def build() -> Task:
        task: Task = make()

        def loss(model: Any, batch: Any) -> Any:
            if model.training:
                name = threading.current_thread().name
                seen[name] += 1
                is_late = sum(seen.values()) > TURNS_AT * 16
                time.sleep(4e-3 if (name == "worker 1") != is_late else 1e-3)
            return task.loss(model, batch)

        return replace(task, loss=loss)

    own = ["--train.global_batch=16", "--train.micro_batch=1", f"--train.steps={STEPS}", "--checkpoint.every=16"]
    own += ["--observe.tensorboard=false", "--elastic.loss_s=1e9", f"--run_dir={folder / 'run'}"]
    train_in_rounds(*own, *options, plan=plan, build=build)
    return Recorded(folder, 0, "", "")


def test_the_curve_stays_while_shares_follow_the_speed(tmp_path: Path) -> None:
    equal = _train(tmp_path / "equal")
    speed = _train(tmp_path / "speed", "--parallel.balance=speed")
    assert not equal.events("shares")
    assert speed.losses() == pytest.approx(equal.losses(), rel=1e-6, abs=1e-6)
    shares = [event["shares"] for event in speed.events("shares")]
    assert shares[0][0] > shares[0][1] and shares[-1][0] < shares[-1][1]
    assert all(sum(each) == 16 for each in shares)
    report = verify_data(speed.run)
    assert not report.wrong and report.last == STEPS


def test_ranks_may_change_with_shares_by_speed(tmp_path: Path) -> None:
    plan = (Period((0, 1, 2), 20, killed=(2,)), Period((0, 1), 12), Period((0, 1, 3)))
    speed = _train(tmp_path / "speed", "--parallel.balance=speed", plan=plan)
    assert speed.losses() == pytest.approx(_train(tmp_path / "equal").losses(), rel=1e-6, abs=1e-6)
    assert len({len(event["shares"]) for event in speed.events("shares")}) == 2
    assert not verify_data(speed.run).wrong
