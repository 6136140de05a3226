"""The journal: full precision, valid JSON, whole lines after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.observe.journal import Journal
from hvdtrain.observe.past_journal import is_finished, last_step, read_journal, read_steps


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_full_precision(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = Journal(path, pytest.fail)
    journal.write({"step": 1, "loss": value})
    journal.close()
    assert read_steps(path)[1]["loss"] == value


def test_not_a_number_is_written_as_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", pytest.fail)
    journal.write({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    journal.close()
    line = (tmp_path / "j").read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
    }


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_line_that_was_cut_spoils_no_other(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    journal = Journal(path, pytest.fail)
    journal.write({"step": 1, "loss": 0.5})
    journal.write({"step": 2, "loss": 0.25})
    journal.close()
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    journal = Journal(path, pytest.fail)
    journal.write({"step": 2, "loss": 0.125})
    journal.close()
    steps = read_steps(path)
    assert steps[1]["loss"] == 0.5
    assert steps[2]["loss"] == 0.125
    assert all(json.loads(line)["step"] in (1, 2) for line in path.read_bytes().splitlines()[-1:])


def test_steps_done_again_count_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", pytest.fail)
    for step, loss in ((1, 1.0), (2, 2.0), (1, 3.0)):
        journal.write({"step": step, "loss": loss})
    journal.write({"event": "resumed", "step": 9})
    journal.close()
    assert {n: line["loss"] for n, line in read_steps(tmp_path / "j").items()} == {1: 3.0, 2: 2.0}
    assert len(read_journal(tmp_path / "j")) == 4


def test_the_last_step_is_found_behind_events_and_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, pytest.fail)
    assert last_step(path) == 0
    journal.write({"step": 1, "filler": "x" * 100_000})
    journal.write({"step": 2})
    journal.write({"event": "resumed", "step": 7})
    assert last_step(path) == 2
    journal.close()
    with path.open("a") as file:
        file.write('{"step": 3')
    assert last_step(path) == 2


def test_finished_is_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path, pytest.fail)
    assert not is_finished(path)
    journal.write({"event": "finished"})
    assert is_finished(path)
    journal.write({"event": "started", "filler": "x" * 100_000})
    assert not is_finished(path)
    journal.write({"event": "finished"})
    journal.write({"event": "warning", "text": "a sink was left behind"})
    for event in ("machine", "explained"):
        journal.write({"event": event})
        assert is_finished(path)
    journal.write({"step": 3})
    assert not is_finished(path)
    journal.close()


def test_values_that_json_cannot_hold_are_written_as_text(tmp_path: Path) -> None:
    """An error's message may hold bytes that are no text; the record of a failure must not be lost for it."""
    journal = Journal(tmp_path / "journal.jsonl", pytest.fail)
    broken = b"caf\xe9".decode("utf-8", errors="surrogateescape")
    journal.write(
        {
            "event": "failed",
            "message": broken,
            "at": [1 << 70, float("inf"), None, True],
            "what": {
                3,
            },
        }
    )
    journal.close()
    (line,) = read_journal(tmp_path / "journal.jsonl")
    assert line == {"event": "failed", "message": "caf\\udce9", "at": [str(1 << 70), None, None, True], "what": "{3}"}


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "started"}\n{"step": 1, "loss": 2.0}\n')
    assert read_steps(str(path)) == read_steps(path) == {1: {"step": 1, "loss": 2.0}}
    assert read_journal(str(path)) == read_journal(path)
