"""The journal on a disk that gets full, and has room again: lines are whole, and in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.journal import Journal, LineFile
from hvdtrain.observe.past_journal import read_journal
from tests.support.full_disk import room_for


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


def test_a_disk_that_is_full_for_ever_ends_nothing() -> None:
    said = list[str]()
    journal = Journal(Path("/dev/full"), said.append)
    journal.write({"event": "started"})
    journal.close()
    assert len(said) == 2
