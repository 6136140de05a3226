"""The disk of the records is full for a while, or for good: training continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.journal import LineFile
from hvdtrain.observe.past_journal import read_journal
from tests.support.toy import toy


@pytest.mark.parametrize(("first", "last"), [(5, 9), (5, 99), (1, 99)], ids=["for a while", "for ever", "always"])
def test_a_journal_that_cannot_be_written_ends_no_run(
    first: int, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, at = LineFile.write, [0]

    def full(self: LineFile, record: Mapping[str, Any]) -> None:
        at[0] += self.path.name == "journal.jsonl"
        if self.path.name == "journal.jsonl" and first <= at[0] <= last:
            raise RunDirectoryError("journal.jsonl cannot be written: No space left on device")
        write(self, record)

    monkeypatch.setattr(LineFile, "write", full)
    monkeypatch.setattr("hvdtrain.observe.journal._RETRY_S", 0.0)
    options = {"run_dir": str(tmp_path), "train": {"steps": 8, "global_batch": 8, "micro_batch": 2}}
    result = hvdtrain.train(options, toy)
    assert (result.reason, result.step) == ("finished", 8)
    said = "".join(capfd.readouterr())
    assert said.count("make room") == 1
    assert ("are missing" in said) == (last == 99)
    lines = read_journal(tmp_path / "journal.jsonl")
    if last == 99:
        assert len(lines) == first - 1
    else:
        assert [line["step"] for line in lines if "event" not in line] == list(range(1, 9))
        assert "finished" in [line.get("event") for line in lines]
