"""The runner of tests: what a failure means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runner.plugin import NOT_RUN
from tests.runner.results import FAILED, PASSED, SKIPPED, Outcome, cut_off, judged, read_results
from tests.runner.times import read_times
from tests.support.launch import ROOT


def lines(file: Path, *written: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in written))
    return file


def test_a_test_without_an_outcome_was_lost_with_its_process(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "results",
        {"tests": ["a", "b"]},
        {"begins": "a"},
        {"test": "a", "outcome": PASSED, "slow": False, "error": None},
        {"test": "a", "seconds": 1.5},
        {"begins": "b"},
    )
    file.write_text(file.read_text() + '{"test": "b", "outc')
    found = read_results([file])
    assert found["a"] == Outcome(PASSED, seconds=1.5)
    assert found["b"].kind == FAILED
    assert {name: outcome.kind for name, outcome in cut_off(found).items()} == {"a": PASSED, "b": NOT_RUN}


def test_a_failure_in_teardown_or_on_one_rank_is_one_of_the_test(tmp_path: Path) -> None:
    passes = {"test": "a", "outcome": PASSED, "slow": True, "error": None}
    fails = {"test": "a", "outcome": FAILED, "slow": True, "error": "it leaks"}
    assert read_results([lines(tmp_path / "0", passes, fails)])["a"] == Outcome(FAILED, True, 0.0, "it leaks")
    ranks = [lines(tmp_path / "0", passes), lines(tmp_path / "1", fails), lines(tmp_path / "2", passes)]
    assert read_results(ranks)["a"].kind == FAILED


@pytest.mark.parametrize(
    ("again", "is_unstable"),
    [
        ([PASSED, PASSED], True),
        ([PASSED, FAILED], False),
        ([PASSED, SKIPPED], False),
        ([PASSED, None], False),
        ([], False),
    ],
)
def test_only_what_passes_each_time_is_unstable(again: list[str | None], is_unstable: bool) -> None:
    runs = [{} if kind is None else {"a": Outcome(kind)} for kind in again]
    assert judged({"a": Outcome(FAILED), "b": Outcome(PASSED)}, runs) == {"a": is_unstable}


def test_contributing_has_the_table_of_times() -> None:
    assert read_times().table() in (ROOT / "CONTRIBUTING.md").read_text()
