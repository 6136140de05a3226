"""What the benchmark of recoveries makes of marks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

_SPEC = importlib.util.spec_from_file_location(
    "recovery_marks", Path(__file__).parents[2] / "benchmarks" / "recovery_marks.py"
)
assert _SPEC and _SPEC.loader
marks = sys.modules["recovery_marks"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(marks)
Mark = marks.Mark

KILLED_S = 100.0


def _steps(first: int, last: int, start_s: float, each_s: float, size: int) -> list[Any]:
    return [Mark(start_s + (n - first + 1) * each_s, "step", n, size) for n in range(first, last + 1)]


def _job(parts: list[float], back: int = 0) -> list[Any]:
    """Ten steps of 1 s; a kill within the eleventh; it goes on with one rank, `back` steps before."""
    found, now = _steps(1, 10, KILLED_S - 10.5, 1.0, 2), KILLED_S
    for kind, part in zip(("failed", "met", "restored"), parts, strict=False):
        now += part
        found.append(Mark(now, kind, size=1))
    return [*found, *_steps(11 - back, 20 - back, now, parts[3], 1)]


@given(st.lists(st.floats(0.01, 10), min_size=4, max_size=4), st.integers(0, 8))
def test_parts_sum_to_the_whole_and_steps_done_again_come_after_it(parts: list[float], back: int) -> None:
    found = marks.split(_job(parts, back), KILLED_S)
    assert [found.detect_s, found.rendezvous_s, found.restore_s, found.step_s] == pytest.approx(parts)
    assert found.seconds == pytest.approx(sum(parts))
    assert found.before_step_s == pytest.approx(sum(parts[:3]))
    assert found.lost_steps == back
    assert found.passed_s == pytest.approx(found.seconds + back * parts[3])


def test_a_step_that_ends_after_the_kill_counts_as_before_it() -> None:
    job = [m for m in _job([0.5, 0.1, 0.1, 1.0]) if m.step != 11]
    found = marks.split([*job, Mark(KILLED_S + 0.4, "step", 11, 2)], KILLED_S)
    assert found.step_s == pytest.approx(2.0)
    assert found.lost_steps == 0


def test_nothing_is_known_while_a_mark_is_missing() -> None:
    job = sorted(_job([0.5, 0.1, 0.1, 1.0], back=3), key=lambda mark: mark.time)
    numbers = [n for n in range(len(job)) if marks.split(job[:n], KILLED_S) is not None]
    first = next(n for n, mark in enumerate(job) if mark.time > KILLED_S and mark.step == 11)
    assert numbers == list(range(first + 1, len(job)))


@given(st.floats(0.0, 20.0))
def test_a_pause_is_the_time_of_joining_beyond_a_step(standstill_s: float) -> None:
    job = _job([0.5, 0.1, 0.1, 1.0])
    assert marks.come_back(job, KILLED_S, 2) is None
    last_s = max(m.time for m in job)
    again = _steps(21, 25, last_s + standstill_s, 1.0, 2)
    found = marks.come_back([*job, *again], KILLED_S, 2)
    assert found.standstill_s == pytest.approx(standstill_s)
    assert found.whole_s == pytest.approx(again[0].time - KILLED_S)


def test_our_marks_are_read_from_journal_and_events(tmp_path: Path) -> None:
    lines = [
        {"event": "started", "size": 2, "time": 1.0},
        {"step": 1, "time": 2.0},
        {"event": "machine", "time": 2.5},
        {"event": "started", "size": 1, "time": 3.2},
        {"event": "resumed", "step": 1, "time": 3.3},
        {"step": 2, "time": 4.0},
    ]
    joins = [("started", 0.5), ("failed", 3.1), ("changed", 9.0)]
    (tmp_path / "journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"event": "join", "why": why, "wall_s": s} for why, s in joins]
    (tmp_path / "events").write_text("".join(json.dumps(e) + "\n" for e in [*events, {"event": "round"}]) + '{"eve')
    found = sorted(marks.of_ours(tmp_path / "journal", tmp_path / "events"), key=lambda mark: mark.time)
    assert [(m.time, m.kind, m.step, m.size) for m in found] == [
        (1.0, "met", 0, 2),
        (2.0, "step", 1, 2),
        (3.1, "failed", 0, 0),
        (3.2, "met", 0, 1),
        (3.3, "restored", 0, 1),
        (4.0, "step", 2, 1),
    ]
    assert marks.split(found, 2.9).seconds == pytest.approx(1.1)


def test_marks_of_a_peer_are_those_of_all_its_processes(tmp_path: Path) -> None:
    assert marks.of_peer(tmp_path) == []
    for pid in (7, 8):
        line = {"kind": "step", "time": 1.0 * pid, "pid": pid, "rank": pid - 7, "size": 2, "step": 1}
        (tmp_path / f"{pid}.marks").write_text(json.dumps(line) + "\n")
    assert {(m.pid, m.rank) for m in marks.of_peer(tmp_path)} == {(7, 0), (8, 1)}


@given(st.floats(0.0, 1.0), st.floats(0.0, 30.0))
def test_the_kill_comes_at_its_part_of_a_step_to_come(phase: float, late_s: float) -> None:
    ends = [1.0, 3.0, 5.0]
    wait_s = marks.kill_at(ends, phase, lambda: 5.0 + late_s)
    assert -1e-9 <= wait_s <= 2.0 + 1e-9
    place = (late_s + wait_s - 2.0 * phase) / 2.0
    assert place == pytest.approx(round(place), abs=1e-9)
