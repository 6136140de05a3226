"""Lines are appended whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.journal import LineFile
from hvdtrain.observe.past_journal import read_journal
from tests.support.full_disk import room_for


def test_a_line_that_finds_no_room_leaves_no_part_of_itself(tmp_path: Path) -> None:
    journal = LineFile(tmp_path / "j")
    journal.write({"step": 1})
    with room_for(tmp_path / "j", 50), pytest.raises(RunDirectoryError, match="No space left on device"):
        journal.write({"step": 2, "filler": "x" * 100})
    journal.write({"event": "failed"})
    journal.close()
    assert read_journal(tmp_path / "j") == [{"step": 1}, {"event": "failed"}]


def test_a_full_disk_is_named() -> None:
    journal = LineFile(Path("/dev/full"))
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        journal.write({"step": 1})
    journal.close()
