"""The journal: full precision, valid JSON, whole lines, also on a full disk; what it tells of the run so far."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe import past_journal
from hvdtrain.observe.journal import Journal, LineFile
from hvdtrain.observe.past_journal import is_finished, last_step, read_steps
from tests.support.full_disk import room_for
from tests.support.journals import read_journal
from tests.support.tensorboard_run import BATCH, Run


def write(path: Path, *records: Mapping[str, Any]) -> Path:
    """Append lines as a process does."""
    journal = Journal(path, pytest.fail)
    for record in records:
        journal.write(record)
    journal.close()
    return path


@settings(max_examples=30)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_full_precision(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = write(tmp_path_factory.mktemp("journal") / "j", {"step": 1, "loss": value})
    assert read_steps(path)[1]["loss"] == value


def test_values_that_json_cannot_hold_are_null_or_text(tmp_path: Path) -> None:
    """An error's message may hold bytes that are no text; the record of a failure must not be lost for it."""
    broken = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    plain = {"step": 1, "loss": math.nan, "grad_norm": math.inf}
    strange = {"event": "failed", "message": broken, "at": [1 << 70, float("inf"), None, True], "what": {3}}
    text = write(tmp_path / "j", plain, strange).read_text()
    found = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in text.splitlines()]
    assert found[0] == {"step": 1, "loss": None, "grad_norm": None}
    at = [str(1 << 70), None, None, True]
    assert found[1] == {"event": "failed", "message": "caf\\udce9", "at": at, "what": "{3}"}


@pytest.mark.parametrize("cut", [1, 2, 11, 21])
def test_a_line_that_was_cut_spoils_no_other(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "j", {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25})
    path.write_bytes(path.read_bytes()[:-cut])
    write(path, {"step": 2, "loss": 0.125})
    steps = read_steps(path)
    assert (steps[1]["loss"], steps[2]["loss"]) == (0.5, 0.125)
    assert json.loads(path.read_bytes().splitlines()[-1])["step"] == 2


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": loss} for step, loss in ((1, 1.0), (2, 2.0), (1, 3.0))]
    path = write(tmp_path / "j", *lines, {"event": "resumed", "step": 9})
    assert {n: line["loss"] for n, line in read_steps(path).items()} == {1: 3.0, 2: 2.0}
    assert len(read_journal(path)) == 4
    assert read_steps(str(path)) == read_steps(path)


def test_the_last_step_is_found_behind_events_and_a_cut_line(tmp_path: Path) -> None:
    path = write(tmp_path / "j")
    assert last_step(path) == 0
    write(path, {"step": 1, "filler": "x" * 100_000}, {"step": 2}, {"event": "resumed", "step": 7})
    assert last_step(path) == 2
    with path.open("a") as file:
        file.write('{"step": 3')
    assert last_step(path) == 2


def test_finished_is_the_last_word(tmp_path: Path) -> None:
    path = write(tmp_path / "j")
    assert not is_finished(path)
    for record, finished in (
        ({"event": "finished"}, True),
        ({"event": "started", "filler": "x" * 100_000}, False),
        ({"event": "finished"}, True),
        ({"event": "warning", "text": "a sink was left behind"}, True),
        ({"event": "energy", "joules": {}}, True),
        ({"event": "machine"}, True),
        ({"event": "explained"}, True),
        ({"step": 3}, False),
    ):
        assert is_finished(write(path, record)) == finished, record


def _record(step: int) -> dict[str, object]:
    return {"step": step, "filler": "x" * 100}


def _steps(path: Path) -> list[object]:
    return [line["step"] for line in read_journal(path)]


def test_a_line_that_finds_no_room_leaves_no_part_of_itself(tmp_path: Path) -> None:
    journal = LineFile(tmp_path / "j")
    journal.write({"step": 1})
    with room_for(tmp_path / "j", 50), pytest.raises(RunDirectoryError, match="No space left on device"):
        journal.write(_record(2))
    journal.write({"event": "failed"})
    journal.close()
    assert read_journal(tmp_path / "j") == [{"step": 1}, {"event": "failed"}]


def test_what_finds_no_room_waits_and_is_written_in_order(tmp_path: Path) -> None:
    said, now_s = list[str](), [0.0]
    journal = Journal(tmp_path / "j", said.append, clock=lambda: now_s[0])
    journal.write(_record(1))
    with room_for(tmp_path / "j", 250):
        for step in range(2, 7):
            journal.write(_record(step))
            now_s[0] += 10.0
    assert _steps(tmp_path / "j") == [1, 2, 3]
    assert len(said) == 1 and "No space left" in said[0]
    journal.write(_record(7))
    assert _steps(tmp_path / "j") == list(range(1, 8))
    assert len(said) == 2 and "again" in said[1]
    journal.close()
    assert len(said) == 2


@pytest.mark.parametrize("later_s", [2.0, None])
def test_it_is_not_tried_at_each_line_but_later_and_at_the_end(tmp_path: Path, later_s: float | None) -> None:
    now_s = [0.0]
    journal = Journal(tmp_path / "j", list[str]().append, clock=lambda: now_s[0])
    with room_for(tmp_path / "j", 0):
        journal.write(_record(1))
    journal.write(_record(2))
    assert _steps(tmp_path / "j") == []
    if later_s is not None:
        now_s[0] = later_s
        journal.write(_record(3))
        assert _steps(tmp_path / "j") == [1, 2, 3]
    journal.close()
    assert _steps(tmp_path / "j")[:2] == [1, 2]


def test_of_too_many_the_oldest_are_lost_and_counted_where_they_were(tmp_path: Path) -> None:
    said, now_s = list[str](), [0.0]
    journal = Journal(tmp_path / "j", said.append, limit=3, clock=lambda: now_s[0])
    journal.write(_record(1))
    with room_for(tmp_path / "j", 0):
        for step in range(2, 8):
            journal.write(_record(step))
    now_s[0] = 5.0
    journal.write(_record(8))
    found = [line.get("step") or (line["event"], line["lines"]) for line in read_journal(tmp_path / "j")]
    assert found == [1, ("lines_lost", 4), 6, 7, 8]
    assert any("4 lines of the journal are lost" in text for text in said)
    journal.close()


def test_lines_missing_at_the_end_are_reported(tmp_path: Path) -> None:
    said = list[str]()
    journal = Journal(tmp_path / "j", said.append)
    journal.write(_record(1))
    with room_for(tmp_path / "j", 0):
        for step in range(2, 5):
            journal.write(_record(step))
        journal.close()
    assert len(said) == 2 and "3 lines" in said[1] and "steps 2 to 4" in said[1]
    full = Journal(Path("/dev/full"), said.append)
    full.write({"event": "started"})
    full.close()
    assert len(said) == 4, "a disk that is full for ever ends nothing"


def test_seconds_and_positions_leave_out_what_was_done_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(None, [1.0] * 10)
    run.stretch(6, [0.25] * 4)
    with run.journal.open("ab") as file:
        file.write(b'{"step":11,"step_s"')  # a kill
    past = past_journal.PastSteps(run.journal).read()
    assert list(past.seconds) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 6.25, 6.5, 6.75, 7.0]
    assert past.positions[10] == 10 * BATCH
    assert 10 in past and 11 not in past
    missing = past_journal.PastSteps(tmp_path / "missing").read()
    assert 0 in missing and 1 not in missing
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    other.stretch(500, [1.0] * 3)  # it began from another run's checkpoint
    past = past_journal.PastSteps(other.journal).read()
    assert (past.seconds[503], past.positions[503]) == (3.0, 503 * BATCH)


def test_steps_and_events_after_a_step_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(None, [1.0] * 10, save_every=5)
    run.stretch(5, [2.0] * 6, save_every=5)
    past = past_journal.PastSteps(run.journal).read()
    assert past.step_before(11, 5.0) == 8
    assert past.step_before(11, 1000.0) == 0
    found = [(r.get("event"), r.get("step", r.get("at_step"))) for r in past.records_after(8, 10)]
    assert found == [(None, 9), (None, 10), ("checkpoint", 10), ("evaluation", 10)]
    assert [r["step_s"] for r in past.records_after(0, 11) if "event" not in r] == [1.0] * 5 + [2.0] * 6


def test_a_clock_that_was_set_between_two_starts_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(None, [1.0] * 10)
    expected = past_journal.PastSteps(run.journal).read().step_before(10, 5.0)
    for jump_s in (-7200.0, 7200.0):
        lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
        for line in lines:
            line["time"] += jump_s * (line.get("step", 0) > 8)
        run.journal.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        assert past_journal.PastSteps(run.journal).read().step_before(10, 5.0) == expected == 4


def test_steps_of_a_start_are_sampled_evenly(tmp_path: Path) -> None:
    path, lines = tmp_path / "journal.jsonl", []
    for start, steps in ((0, range(1, 21)), (1, range(11, 1011))):
        lines.append({"event": "started", "start": start})
        for step in steps:
            lines.append({"step": step, "step_s": step / 10, "at": start})
            lines += [{"event": "evaluation", "at_step": step}] if step % 10 == 0 else []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step":1011,"st')
    first, second = past_journal.read_journal_starts(path)
    assert [line["step"] for line in past_journal.sampled_steps(path, first, 100).values()] == list(range(1, 21))
    found = list(past_journal.sampled_steps(path, second, 100).values())
    assert [(line["step"] - 11) // 10 for line in found] == list(range(100)) and {line["at"] for line in found} == {1}
    assert len({line["step"] % 10 for line in found}) == 10, "no period is missed"


def test_starts_have_the_durations_of_steps_and_those_that_changed_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines: list[dict[str, object]] = [{"event": "started", "time": 1.0}]
    lines += [
        {"step": step, "time": 10.0 + step, "step_s": step / 4, "skipped": step in (2, 3)} for step in range(1, 5)
    ]
    lines += [{"event": "started", "time": 20.0}, {"step": 3, "time": 21.0, "step_s": 0.5, "skipped": False}]
    lines += [{"step": 4, "time": 23.0, "step_s": "x", "skipped": True}, {"step": 5, "time": 24.0}]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    first, second = past_journal.read_journal_starts(path)
    assert first.steps.tolist() == [1, 2, 3, 4] and first.seconds.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert first.skipped == [1, 2] and first.first_times == [11.0, 12.0, 13.0, 14.0] and first.last_step_time == 14.0
    assert second.steps.tolist() == [3, 4, 5] and second.seconds.tolist() == [0.5, 0.0, 0.0]
    assert past_journal.skipped_steps([first, second]) == {2, 4} and past_journal.skipped_steps([first]) == {2, 3}
