"""Told once: by whichever rank comes first, by the next if that one is lost, from the training thread or beside it."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.observe.failure import reporter as module
from hvdtrain.observe.failure.failure_output import FailureOutput
from hvdtrain.observe.failure.mailbox import Mailbox, open_post
from hvdtrain.observe.failure.process import UNKNOWN, UNREACHABLE
from hvdtrain.observe.failure.reporter import Job, Reporter, set_old_aside
from hvdtrain.observe.failure.statement import STALLED, Witness, myself
from hvdtrain.spans import Spans
from tests.support.launch import TIMEOUT_S
from tests.support.thread_comm import on_ranks


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OTHERS_COME_S", 0.2)


def _reporters(place: Path, size: int, shown: list[str]) -> list[Reporter]:
    def body(comm: Comm) -> Reporter:
        post = open_post(place, comm, myself(comm.rank, "a"))
        job = Job(place, place, "again", lambda: None)
        return Reporter(post, Witness(post.who, Spans(), {}), job, FailureOutput(shown.append))

    return on_ranks(size, body)


def _fail(reporter: Reporter) -> None:
    reporter.failed(ValueError(f"rank {reporter.post.who.rank}"))


def test_one_card_of_ranks_that_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_OTHERS_COME_S", "_CARD_COMES_S"):
        monkeypatch.setattr(module, name, TIMEOUT_S)
    shown: list[str] = []
    reporters = _reporters(tmp_path, 4, shown)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_fail, reporters))
    assert len(shown) == 1
    assert all(reporter.voice.told for reporter in reporters)
    assert (tmp_path / "failure.txt").read_text() == shown[0]
    card = json.loads((tmp_path / "failure.json").read_text())
    assert sorted(s["who"]["rank"] for s in card["statements"]) == [0, 1, 2, 3]
    assert card["size"] == 4 and card["kind"] == "exception"


def test_a_card_that_does_not_come_is_written_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CARD_COMES_S", 0.1)
    shown: list[str] = []
    first, second = _reporters(tmp_path, 2, shown)
    assert first.post.claim(0), "and then it is killed"
    _fail(second)
    assert len(shown) == 1 and second.voice.told


def test_what_the_others_said_stands_on_it(tmp_path: Path) -> None:
    shown: list[str] = []
    first, second = _reporters(tmp_path, 2, shown)
    thread = threading.Thread(target=second.say)  # as its watchdog does
    thread.start()
    thread.join()
    _fail(first)
    card = json.loads((tmp_path / "failure.json").read_text())
    assert card["ranks"] == [0]
    assert [s["kind"] for s in card["statements"]] == ["failed", "here"]


def test_an_interrupt_by_hand_is_no_failure(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter = _reporters(tmp_path, 1, shown)[0]
    reporter.failed(KeyboardInterrupt())
    assert not shown and not reporter.voice.told and not (tmp_path / "failure.txt").exists()
    assert reporter.post.has_left(0)


def test_a_disk_that_is_gone_leaves_the_screen(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter = _reporters(tmp_path, 1, shown)[0]
    reporter.job.place = tmp_path / "nowhere"
    reporter.post = dataclasses.replace(reporter.post, folder=None)
    _fail(reporter)
    assert "rank 0 on a failed: ValueError" in shown[0] and "ValueError: rank 0" in shown[0]
    assert "could not be written" not in shown[0]


def test_a_fault_in_the_card_still_tells_the_error(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter = _reporters(tmp_path, 1, shown)[0]
    reporter.job.checkpoint = lambda: 1 // 0  # type: ignore[assignment,return-value]
    _fail(reporter)
    assert "ValueError: rank 0" in shown[0] and "ZeroDivisionError" in shown[0]
    assert reporter.post.told()


def test_memory_is_asked_for_only_where_it_ran_out(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter = _reporters(tmp_path, 1, shown)[0]
    asked: list[str] = []

    def held() -> dict[str, Any]:
        asked.append("how much")
        return {"where": "host's", "mib": {"x": 1.0}, "micro_batch": 4, "precision": "fp32"}

    reporter.job.held = held
    _fail(reporter)
    assert "what held" not in shown[0] and not asked
    again = _reporters(tmp_path, 1, shown)[0]
    again.job.held = reporter.job.held
    again.failed(MemoryError("no"))
    assert "what held the host's memory" in shown[1]


def test_the_card_of_an_earlier_start_is_set_aside(tmp_path: Path) -> None:
    shown: list[str] = []
    _fail(_reporters(tmp_path, 1, shown)[0])
    set_old_aside(tmp_path)
    assert not (tmp_path / "failure.txt").exists() and not (tmp_path / "failure.json").exists()
    assert sorted(path.suffix for path in (tmp_path / "failures").iterdir()) == [".json", ".txt"]
    set_old_aside(tmp_path)


class _Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("not even its text")


def test_an_error_of_any_text_is_told(tmp_path: Path) -> None:
    for number, error in enumerate((_Mute(), ValueError(b"caf\xe9".decode("utf-8", errors="surrogateescape")))):
        shown: list[str] = []
        reporter = _reporters(tmp_path / str(number), 1, shown)[0]
        reporter.failed(error)
        assert f"failed: {type(error).__name__}" in shown[0] and "could not be written" not in shown[0]
        assert (tmp_path / str(number) / "failure.txt").read_text() == shown[0]


def test_what_cannot_be_told_of_a_failure_leaves_the_least(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    shown: list[str] = []
    reporter = _reporters(tmp_path, 1, shown)[0]
    monkeypatch.setattr(Witness, "failed", fails)
    monkeypatch.setattr(Witness, "here", fails)
    reporter.failed(ValueError("no"))
    assert "rank 0 on a failed: ValueError" in shown[0] and reporter.voice.told
    assert reporter.say().kind == "here"


def test_ranks_that_share_no_folder_are_neither_blamed_nor_awaited(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter = _reporters(tmp_path, 3, shown)[0]
    reporter.post = dataclasses.replace(reporter.post, reachable=frozenset({0, 1}), visible=frozenset())
    reporter.tell(reporter.say(STALLED), 0.0, shown.append)
    card = json.loads((tmp_path / "failure.json").read_text())
    assert {s["who"]["rank"]: s["state"] for s in card["silent"]} == {1: UNKNOWN, 2: UNREACHABLE}
    assert card["ranks"] == [1]
    assert "speaks for itself" in shown[0]
    (tmp_path / "failure.json").unlink()
    reporter.post = dataclasses.replace(reporter.post, folder=None)
    reporter.tell(reporter.say(STALLED), 1000.0, shown.append)
    card = json.loads((tmp_path / "failure.json").read_text())
    assert {s["state"] for s in card["silent"]} == {UNREACHABLE} and card["ranks"] == [0, 1, 2]


def test_who_is_still_at_the_card_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CARD_COMES_S", 0.05)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.02)
    shown: list[str] = []
    first, second = _reporters(tmp_path, 2, shown)
    assert first.post.claim(0)
    looks = 0

    def told(post: Mailbox) -> bool:
        nonlocal looks
        looks += 1
        first.post.go_on_claiming(0)
        return looks > 10

    monkeypatch.setattr(Mailbox, "told", told)
    _fail(second)
    assert not shown and second.voice.told


def test_many_ranks_are_waited_for_as_long_as_they_need_to_look(tmp_path: Path) -> None:
    reporter = _reporters(tmp_path, 1, [])[0]
    for size in (1, 100, 10_000):
        reporter.post = dataclasses.replace(reporter.post, ranks=reporter.post.ranks[:1] * size)
        assert reporter._others_come_s() > reporter.post.every_s(0.0)


def test_who_writes_the_card_says_so_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, now_s = list[int](), [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds))
    monkeypatch.setattr(Mailbox, "go_on_claiming", lambda post, number: said.append(number))
    _fail(_reporters(tmp_path, 2, [])[0])
    assert len(said) > 1, "the other rank never speaks"
