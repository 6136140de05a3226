"""The journal: full precision, valid JSON, whole lines after a kill and on a disk that gets full."""

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
from hvdtrain.observe.journal import Journal, LineFile
from hvdtrain.observe.past_journal import is_finished, last_step, read_journal, read_steps
from tests.support.full_disk import room_for


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
    assert read_steps(str(path)) == read_steps(path) and read_journal(str(path)) == read_journal(path)


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
