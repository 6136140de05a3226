"""The card is printed once: by the first rank, by the next if that one is lost, from the training thread or another."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.observe.failure import reporter as module
from hvdtrain.observe.failure.mailbox import Mailbox, open_mailbox
from hvdtrain.observe.failure.process_states import UNKNOWN, UNREACHABLE
from hvdtrain.observe.failure.reporter import JobFacts, Reporter, archive_old_card
from hvdtrain.observe.failure.statement import STALLED, StatementMaker, this_process
from hvdtrain.observe.output import FailureOutput
from hvdtrain.spans import Spans
from tests.support.launch import TIMEOUT_S
from tests.support.thread_comm import on_ranks


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STATEMENTS_WAIT_S", 0.05)


def _reporters(place: Path, size: int, shown: list[str]) -> list[Reporter]:
    def body(comm: Comm) -> Reporter:
        mailbox = open_mailbox(place, comm, this_process(comm.rank, "a"))
        job = JobFacts(place, place, "again", lambda: None)
        return Reporter(mailbox, StatementMaker(mailbox.process, Spans(), {}), job, FailureOutput(shown.append))

    return on_ranks(size, body)


@pytest.fixture
def alone(tmp_path: Path) -> tuple[Reporter, list[str]]:
    """A single rank, and the cards that it shows."""
    shown: list[str] = []
    return _reporters(tmp_path, 1, shown)[0], shown


def _card(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "failure.json").read_text()))


def _fail(reporter: Reporter) -> None:
    reporter.report_error(ValueError(f"rank {reporter.mailbox.process.rank}"))


def test_one_card_of_ranks_that_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STATEMENTS_WAIT_S", "_CARD_WAIT_S"):
        monkeypatch.setattr(module, name, TIMEOUT_S)
    shown: list[str] = []
    reporters = _reporters(tmp_path, 4, shown)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_fail, reporters))
    assert len(shown) == 1
    assert all(reporter.output.reported for reporter in reporters)
    assert (tmp_path / "failure.txt").read_text() == shown[0]
    card = _card(tmp_path)
    assert sorted(s["who"]["rank"] for s in card["statements"]) == [0, 1, 2, 3]
    assert card["size"] == 4 and card["kind"] == "exception"


def test_a_card_that_does_not_come_is_written_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CARD_WAIT_S", 0.05)
    shown: list[str] = []
    first, second = _reporters(tmp_path, 2, shown)
    assert first.mailbox.claim_card(0), "and then it is killed"
    _fail(second)
    assert len(shown) == 1 and second.output.reported


def test_what_the_others_said_stands_on_it(tmp_path: Path) -> None:
    first, second = _reporters(tmp_path, 2, [])
    thread = threading.Thread(target=second.post_state)  # as its watchdog does
    thread.start()
    thread.join()
    _fail(first)
    card = _card(tmp_path)
    assert card["ranks"] == [0]
    assert [s["kind"] for s in card["statements"]] == ["failed", "here"]


def test_an_interrupt_by_hand_is_no_failure_and_the_card_of_an_earlier_start_is_set_aside(
    alone: tuple[Reporter, list[str]], tmp_path: Path
) -> None:
    reporter, shown = alone
    reporter.report_error(KeyboardInterrupt())
    assert not shown and not reporter.output.reported and not (tmp_path / "failure.txt").exists()
    assert reporter.mailbox.has_finished(0)
    _fail(reporter)
    archive_old_card(tmp_path)
    assert not (tmp_path / "failure.txt").exists() and not (tmp_path / "failure.json").exists()
    assert sorted(path.suffix for path in (tmp_path / "failures").iterdir()) == [".json", ".txt"]
    archive_old_card(tmp_path)


@pytest.mark.parametrize("lost", ["disk", "checkpoint", "statement"])
def test_the_error_is_shown_whatever_is_lost(
    lost: str, alone: tuple[Reporter, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError(lost)

    reporter, shown = alone
    if lost == "disk":
        reporter.job.absolute_dir = tmp_path / "nowhere"
        reporter.mailbox = dataclasses.replace(reporter.mailbox, folder=None)
    elif lost == "checkpoint":
        reporter.job.checkpoint = fails
    else:
        monkeypatch.setattr(StatementMaker, "failure", fails)
        monkeypatch.setattr(StatementMaker, "current", fails)
    _fail(reporter)
    assert ("rank 0 on a failed: ValueError" if lost != "checkpoint" else "MemoryError") in shown[0]
    assert lost == "statement" or "ValueError: rank 0" in shown[0]
    assert reporter.output.reported and reporter.mailbox.is_reported() == (lost != "disk")
    assert lost != "statement" or reporter.post_state().kind == "here"


def test_memory_is_asked_for_only_where_it_ran_out(alone: tuple[Reporter, list[str]], tmp_path: Path) -> None:
    reporter, shown = alone
    asked: list[BaseException] = []
    held = {"where": "host", "mib": {"x": 1.0}, "micro_batch": 4, "precision": "fp32"}
    error = MemoryError("no")
    reporter.job.memory_holders = lambda error: asked.append(error) or held  # type: ignore[func-returns-value]
    _fail(reporter)
    assert "use of the host" not in shown[0] and not asked
    again = _reporters(tmp_path, 1, shown)[0]
    again.job.memory_holders = reporter.job.memory_holders
    again.report_error(error)
    assert "use of the host's memory" in shown[1] and asked == [error]


def test_ranks_that_share_no_folder_are_neither_blamed_nor_awaited(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter = _reporters(tmp_path, 3, shown)[0]
    reporter.mailbox = dataclasses.replace(reporter.mailbox, reachable=frozenset({0, 1}), visible=frozenset())
    reporter.report(reporter.post_state(STALLED), 0.0, shown.append)
    card = _card(tmp_path)
    assert {s["who"]["rank"]: s["state"] for s in card["silent"]} == {1: UNKNOWN, 2: UNREACHABLE}
    assert card["ranks"] == [1]
    assert "reports for itself" in shown[0]
    (tmp_path / "failure.json").unlink()
    reporter.mailbox = dataclasses.replace(reporter.mailbox, folder=None, reachable=frozenset())
    reporter.report(reporter.post_state(STALLED), 1000.0, shown.append)
    card = _card(tmp_path)
    assert {s["state"] for s in card["silent"]} == {UNREACHABLE} and card["ranks"] == [0, 1, 2]


def test_a_rank_that_still_writes_the_card_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CARD_WAIT_S", 0.05)
    monkeypatch.setattr(module, "_POLL_S", 0.02)
    shown: list[str] = []
    first, second = _reporters(tmp_path, 2, shown)
    assert first.mailbox.claim_card(0)
    looks = itertools.count()

    def told(mailbox: Mailbox) -> bool:
        first.mailbox.renew_claim(0)
        return next(looks) > 10

    monkeypatch.setattr(Mailbox, "is_reported", told)
    _fail(second)
    assert not shown and second.output.reported


def test_the_writer_of_the_card_announces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, now_s = list[int](), [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    monkeypatch.setattr(Mailbox, "renew_claim", lambda mailbox, number: said.append(number))
    reporter = _reporters(tmp_path, 2, [])[0]
    for size in (1, 100, 10_000):
        many = dataclasses.replace(reporter.mailbox, ranks=reporter.mailbox.ranks[:1] * size)
        waits_s = dataclasses.replace(reporter, mailbox=many)._statements_wait_s()
        assert waits_s > many.poll_interval_s(0.0), "many are waited for as long as they need to poll"
    _fail(reporter)
    assert len(said) > 1, "the other rank never speaks"
