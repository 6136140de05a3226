"""Signals wait while an error is reported; saving is progress; a journal that cannot be written ends no run."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.failure.reporter import JobFacts
from hvdtrain.observe.journal import LineFile
from hvdtrain.spans import Spans
from hvdtrain.training.loop.step_sums import SAVE, TERMINATE, PendingSignals, handlers_as_before
from hvdtrain.training.result import journal_figures
from tests.support.journals import read_journal
from tests.support.toy import toy

OPTIONS = {"train": {"steps": 1, "global_batch": 4, "micro_batch": 2}}


def test_saving_and_loading_count_as_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog of every rank looks at this: a large checkpoint on a slow disk is no stall."""
    within: list[str] = []
    monkeypatch.setattr(Spans, "touch", lambda spans: within.append(" ".join(name for name, _ in spans.open())))
    hvdtrain.train(OPTIONS | {"run_dir": str(tmp_path)}, toy)
    assert within.count("checkpoint") > 5
    within.clear()
    hvdtrain.train(OPTIONS | {"run_dir": str(tmp_path)}, toy)
    assert within.count("") > 5, "before the first step: reading, verifying, broadcasting"


def test_at_its_end_a_rank_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last sums, a rank may end before the others."""
    jobs: list[JobFacts] = []
    make = JobFacts.__init__
    monkeypatch.setattr(JobFacts, "__init__", lambda job, *a, **k: jobs.append(job) or make(job, *a, **k))
    seen: list[bool] = []
    monkeypatch.setattr(
        "hvdtrain.training.result.journal_figures", lambda *a: seen.append(jobs[0].is_ending()) or journal_figures(*a)
    )
    hvdtrain.train(OPTIONS | {"run_dir": str(tmp_path)}, toy)
    assert seen == [True]


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


HELD = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


def _handlers() -> list[object]:
    return [signal.getsignal(number) for number in HELD]


@pytest.mark.parametrize("stop_on_usr1", [False, True])
def test_signals_are_kept_until_they_are_handled(stop_on_usr1: bool) -> None:
    """In a job that submits itself again, the notice stops it."""
    before = _handlers()
    with PendingSignals(stop_on_usr1=stop_on_usr1) as signals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        taken = signals.pop()
        assert (taken[SAVE], taken[TERMINATE]) == ((0, 3) if stop_on_usr1 else (2, 1))
        assert not any(signals.pop())
    assert _handlers() == before


def test_a_second_interrupt_interrupts() -> None:
    with handlers_as_before(), pytest.raises(KeyboardInterrupt), PendingSignals():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_rank_that_tells_of_an_error_is_not_ended_by_the_launcher_meanwhile() -> None:
    before = _handlers()
    with pytest.raises(ValueError, match="no"), handlers_as_before():
        try:
            with PendingSignals():
                raise ValueError("no")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert _handlers() == before
