"""When a job ends: its interval, failures, the best interval between checkpoints, and how a promise was kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.ending import Pace, best_every, due, ending, kept, pace_of
from hvdtrain.timeline.analysis.stats import mean_of

PACE = Pace(8, 100, Estimate(1.0, 0.95, 1.05), 30.0, 4.0, 2.0)


def _start(steps: int = 60, **more: Any) -> JournalStart:
    """Steps of 2 s after 30 s, the first of 12 s; an evaluation of 4 s before them, one and a save of 3 s after."""
    seconds = [12.0, *[2.0] * (steps - 1)]
    first = [1030.0 + sum(seconds[: n + 1]) for n in range(steps)]
    events = [{"event": "evaluation", "at_step": at, "seconds": 4.0} for at in (0, steps)]
    start = JournalStart({"event": "started", "size": 2, "time": 1000.0}, 1, steps, first[-1] + 7.0, **more)
    start.events = [*events, {"event": "checkpoint", "at_step": steps}]
    start.steps.extend(range(1, steps + 1))
    start.seconds.extend(seconds)
    start.first_times, start.last_step_time = first[:32], first[-1]
    start.events.append({"event": "finished"})
    return start


def test_the_pace_is_that_of_the_newest_start_with_enough_steps() -> None:
    for starts in ([_start()], [_start(), _start(4)]):
        found = pace_of(starts)
        assert found is not None
        assert (found.ranks, found.steps, found.step_s.value) == (2, 59, 2.0)
        assert found.start_s == pytest.approx(26.0 + 10.0), "without the evaluation before; with the slow first step"
        assert (found.evaluation_s, found.save_s) == (pytest.approx(4.0), pytest.approx(3.0))
    assert pace_of([_start(10)]) is None


def test_the_parts_sum_to_the_end_and_failures_repeat_steps() -> None:
    found = ending(PACE, 1000, 11, 10)
    assert found.seconds.value == pytest.approx(sum(found.parts.values())) == pytest.approx(1000 + 44 + 20 + 30)
    assert found.seconds.low < 1094 < found.seconds.high
    rate = 1 / 2000
    failing = ending(PACE, 1000, 11, 10, failures_per_s=rate)
    assert failing.parts["failures"] == pytest.approx(rate * failing.seconds.value * (30 + 50))
    assert ending(PACE, 1000, 11, 10, failures_per_s=1 / 50).seconds.value == float("inf")
    assert due(0, 100, 30) == 4 and due(30, 90, 30) == 2 and due(30, 90, 0) == 1


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-6])
def test_the_best_interval_between_checkpoints_is_the_cheapest(rate: float) -> None:
    steps = 100_000

    def whole_s(every: int) -> float:
        return ending(PACE, steps, 0, steps // every, failures_per_s=rate).seconds.value

    best = best_every(PACE, rate)
    cheapest = min(range(5, 6 * best, max(1, best // 50)), key=whole_s)
    assert whole_s(best) <= 1.01 * whole_s(cheapest)


@pytest.mark.parametrize(("measured", "to_come", "between"), [(200, 800, 0.03), (800, 100, 0.0)])
def test_the_interval_holds_the_end_of_about_nine_of_ten_jobs(measured: int, to_come: int, between: float) -> None:
    """Of correlated steps, in another job, whose mean differs, or later in the same job."""
    generator, inside = np.random.default_rng(0), 0
    for _ in range(300):
        levels = 1 + between * generator.normal(size=2)
        steps = []
        for level, count in zip(levels, (measured, to_come), strict=True):
            noise = generator.normal(0, 0.1, count)
            for step in range(1, count):
                noise[step] += 0.5 * noise[step - 1]
            steps.append(level * (1 + noise))
        pace = Pace(2, measured, mean_of(steps[0]), 0.0, 0.0, 0.0)
        found = ending(pace, to_come, 0, 0, is_same_job=not between).seconds
        inside += found.low <= steps[1].sum() <= found.high
    assert 0.75 <= inside / 300 <= 0.97


def test_a_kept_promise_is_one_of_the_last_start() -> None:
    promise = {"event": "promise", "at_step": 35, "time": 1000.0, "end": 2000.0, "low": 1900.0, "high": 2100.0}
    finished = {"event": "finished", "time": 2050.0}
    start = JournalStart({}, events=[promise, {**promise, "end": 3000.0}, finished])
    found = kept([JournalStart({}), start])
    assert found is not None and (found.at_step, found.late_s, found.share, found.is_within) == (35, 50.0, 0.05, True)
    stopped = {**finished, "event": "stopped", "reason": "stop_at"}
    assert kept([JournalStart({}, events=[promise, stopped])]) == found
    for event, reason in (("stopped", "SIGTERM"), ("finished", "3 evaluations in a row were not better")):
        assert kept([JournalStart({}, events=[promise, {**finished, "event": event, "reason": reason}])]) is None
    assert kept([start, JournalStart({})]) is None and kept([]) is None
    assert kept([JournalStart({}, events=[{**promise, "end": "x"}, finished])]) is None
