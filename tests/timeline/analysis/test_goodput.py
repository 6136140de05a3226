"""What the device-hours of a run were used for: they sum to its cost, and each use is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe.cost import cost_of
from hvdtrain.observe.past_journal import read_journal_starts
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis import goodput as uses
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.goodput import Goodput, goodput_of
from tests.support.journals import FakeRun
from tests.support.step_tables import run_of, table_of

STEP_S = 36.0


def _found(run: FakeRun, late: dict[int, float] | None = None) -> Goodput:
    starts = read_journal_starts(run.folder / "journal.jsonl")
    found, cost = goodput_of(starts, late), cost_of(starts)
    assert sum(found.hours.values()) == pytest.approx(cost.device_hours)
    return found


def _hours(seconds: float, devices: int = 2) -> float:
    return seconds * devices / 3600


def _start(run: FakeRun, devices: int = 2, **facts: Any) -> None:
    run.write({"event": "started", "size": devices, "devices": devices, "time": run.now_s, **facts})


def _steps(run: FakeRun, first: int, last: int, step_s: float = STEP_S, **facts: Any) -> None:
    for step in range(first, last + 1):
        run.now_s += step_s
        run.write({"step": step, "time": run.now_s, "position": step, "step_s": step_s, **facts})


def test_each_use_is_found(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a")
    _start(run)
    run.now_s += 90.0  # start-up
    run.write({"event": "evaluation", "at_step": 0, "loss": 1.0, "seconds": 30.0, "time": run.now_s})
    _steps(run, 1, 2, 3 * STEP_S)  # slow steps at the start
    _steps(run, 3, 60)
    _steps(run, 61, 61, 20 * STEP_S)  # a stall
    run.now_s += 50.0  # an evaluation of 40 s, and a checkpoint
    run.write({"event": "evaluation", "at_step": 61, "loss": 1.0, "seconds": 40.0, "time": run.now_s})
    _steps(run, 62, 70)
    run.now_s += 300.0  # it hangs
    run.write({"event": "failed", "error": "X", "message": "", "time": run.now_s})
    run.now_s += 1e5  # no devices are held
    _start(run)
    run.now_s += 80.0
    _steps(run, 66, 70)
    _steps(run, 71, 72, skipped=True)
    _steps(run, 73, 100)
    run.write({"event": "finished", "at_step": 100, "time": run.now_s})
    seconds = {
        uses.USEFUL: (100 - 2) * STEP_S,
        uses.STALLS: 19 * STEP_S,
        uses.START_UP: 60.0 + 4 * STEP_S,
        uses.RESTARTS: 300.0 + 80.0,
        uses.REPEATED: (5 + 2) * STEP_S,
        uses.EVALUATIONS: 70.0,
        uses.PAUSES: 10.0,
    }
    assert _found(run).hours == pytest.approx({use: _hours(value) for use, value in seconds.items()})


def test_waiting_for_late_ranks_is_not_training(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a").start([1.0] * 50, step_s=STEP_S, end="").start([1.0] * 50, after=50, step_s=STEP_S)
    found = _found(run, {1: 0.25})
    assert found.hours == pytest.approx({uses.USEFUL: _hours(0.875 * 3600), uses.LATE: _hours(0.125 * 3600)})


def test_late_ranks_of_each_start_count(tmp_path: Path) -> None:
    """A rank is late in the first start, for half of its steps in two rounds; only the second start is analysed."""
    run = FakeRun(tmp_path / "a").start([1.0] * 50, step_s=STEP_S, end="").start([1.0] * 50, after=50, step_s=STEP_S)
    work = np.full((2, 50), 60.0)
    late = np.add(work, [[0.0], [40.0]])
    stamped = [(0, table_of(late, exchange_ms=0.0)), (0, table_of(work)), (1, last := table_of(work))]
    starts = read_journal_starts(run.folder / "journal.jsonl")
    found = analyse(run_of(last, starts=starts, start=starts[1], stamped=stamped)).goodput
    assert found.hours[uses.LATE] == pytest.approx(_hours(0.5 * 0.2 * 0.5 * 3600), rel=0.05), "40 of 100 ms, one of two"


def test_the_devices_that_both_rounds_have_are_held_between_them(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a").start([1.0] * 50, step_s=STEP_S, end="", devices=4)
    run.now_s += 100.0
    run.start([1.0] * 50, after=50, step_s=STEP_S, devices=1, goes_on=True)
    assert _found(run).hours[uses.RESTARTS] == pytest.approx(_hours(100.0, 1))


def test_the_lines_of_several_steps_may_come_together(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a")
    _start(run, 1)
    for window in range(4):
        run.now_s += 8 * STEP_S
        steps = range(8 * window + 1, 8 * window + 9)
        run.write(*({"step": step, "time": run.now_s, "position": step, "step_s": STEP_S} for step in steps))
    run.write({"event": "finished", "at_step": 32, "time": run.now_s})
    assert _found(run).hours == {uses.USEFUL: pytest.approx(_hours(32 * STEP_S, 1))}


@pytest.mark.parametrize("moved_s", [-3600.0, 3600.0])
def test_a_clock_that_was_set_gives_no_negative_hours(tmp_path: Path, moved_s: float) -> None:
    run = FakeRun(tmp_path / "a").start([1.0] * 50, step_s=STEP_S, end="")
    run.now_s += moved_s
    run.start([1.0] * 50, after=50, step_s=STEP_S)
    assert all(hours > 0 for hours in _found(run).hours.values())


def test_a_journal_without_starts_has_none(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a")
    run.write({"step": 1, "time": 5.0, "loss": 1.0})
    assert goodput_of(read_journal_starts(run.folder / "journal.jsonl")) is None


def test_energy_of_steps_that_were_repeated_is_lost(tmp_path: Path) -> None:
    """In each start, 10 steps use 100 J, recorded after 5 and 10 of them; 4 of the first start's are repeated."""
    run = FakeRun(tmp_path / "a")
    for first in (1, 7):
        _start(run, energy={"GPUs": "", "CPUs": "no counters"})
        for begin, joules in ((first, 40.0), (first + 5, 100.0)):
            _steps(run, begin, begin + 4)
            run.write({"event": "energy", "at_step": begin + 4, "joules": {"GPUs": joules}, "time": run.now_s})
    found = _found(run)
    assert found.energy == pytest.approx((40 + 60 / 5 + 100) / 200)
    assert "80% of the device-hours, 76% of the energy of steps; " in wording.goodput(found)
    assert _found(FakeRun(tmp_path / "b").start([1.0] * 10, step_s=STEP_S)).energy is None


def test_a_report_after_the_end_is_not_part_of_the_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "a")
    _start(run)
    _steps(run, 1, 20)
    run.write({"event": "finished", "time": run.now_s})
    before = _found(run).hours
    run.now_s += 500.0
    run.write({"event": "energy", "at_step": 20, "joules": {}, "time": run.now_s})
    run.write({"event": "explained", "at_step": 20, "figures": {}, "time": run.now_s})
    assert _found(run).hours == before
    _start(run)
    _steps(run, 21, 40)
    run.now_s += 50.0
    run.write({"event": "warning", "text": "x", "time": run.now_s})
    assert sum(_found(run).hours.values()) == pytest.approx(sum(before.values()) + _hours(20 * STEP_S + 50))
