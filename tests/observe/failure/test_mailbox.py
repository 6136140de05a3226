"""Files between ranks: each sees what the others left; one alone claims a card."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import on_rank_0
from hvdtrain.observe.failure.fault import Fault
from hvdtrain.observe.failure.mailbox import Beat, Mailbox, open_mailbox
from hvdtrain.observe.failure.process_states import GONE, RUNNING, started
from hvdtrain.observe.failure.statement import CURRENT, FAILED, STALLED, RankProcess, Statement, this_process
from tests.support.launch import ROOT
from tests.support.thread_comm import on_ranks


def _mailboxes(directory: Path, size: int = 3) -> list[Mailbox]:
    def body(comm: Comm) -> Mailbox:
        return open_mailbox(directory, comm, this_process(comm.rank, "a"))

    return on_ranks(size, body)


def _of(mailbox: Mailbox, kind: str, **facts: object) -> Statement:
    return Statement(kind, 1.0, mailbox.process, **facts)  # type: ignore[arg-type]


def test_every_rank_gets_the_answers_of_the_others(tmp_path: Path) -> None:
    mailboxes = _mailboxes(tmp_path)
    assert all(mailbox.reachable == {0, 1, 2} for mailbox in mailboxes)
    assert not any(mailbox.has_statements() for mailbox in mailboxes)
    facts = {"open_spans": [("wait", 1.5)], "in_flight": {"x": 1.0}, "stacks": {"training": ["a"]}}
    said = [_of(mailboxes[0], CURRENT, **facts), _of(mailboxes[2], FAILED, fault=Fault("ValueError", "no"))]
    mailboxes[0].post_statement(said[0])
    mailboxes[2].post_statement(said[1])
    assert all(mailbox.has_statements() for mailbox in mailboxes)
    assert all(mailbox.statements({}) == said for mailbox in mailboxes)
    mailboxes[2].post_statement(_of(mailboxes[2], CURRENT))
    mailboxes[0].post_statement(_of(mailboxes[0], STALLED))
    kinds = [s.kind for s in mailboxes[1].statements({})]
    assert kinds == [STALLED, FAILED], "of a rank's statements the one that says more counts"
    assert mailboxes[1].folder is not None
    (mailboxes[1].folder / "said/00001.failed").write_text('{"kind"')
    assert [s.process.rank for s in mailboxes[1].statements({})] == [0, 2], "half written"


def test_one_rank_alone_claims_a_card(tmp_path: Path) -> None:
    mailboxes = _mailboxes(tmp_path, 8)
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            claims = list(pool.map(lambda mailbox, number=number: mailbox.claim_card(number), mailboxes))
            assert sum(claims) == 1


def test_files_of_an_earlier_start_are_removed(tmp_path: Path) -> None:
    before = _mailboxes(tmp_path, 1)[0]
    before.post_statement(_of(before, FAILED))
    before.mark_reported()
    after = _mailboxes(tmp_path, 1)[0]
    assert not after.has_statements() and not after.is_reported()
    assert before.folder != after.folder
    assert before.has_finished(0), "who still looks at the old place misses nobody there"
    after.remove()
    assert not (tmp_path / ".ranks").exists()


def test_a_listing_tells_of_the_progress_of_all_ranks(tmp_path: Path) -> None:
    mailboxes, names = _mailboxes(tmp_path, 3), ["", "", ""]
    for number in (9, 10):
        for rank, mailbox in enumerate(mailboxes):
            names[rank] = mailbox.post_heartbeat(number, rank + 0.25, {"step": number + rank}, before=names[rank])
    assert mailboxes[0].folder is not None
    alive = mailboxes[0].folder / "alive"
    assert sorted(path.name for path in alive.iterdir()) == [f"0000{rank}.10.{1000 * rank + 250}" for rank in range(3)]
    (alive / ".nfs0001").touch()
    (alive / "00001.9.4000").touch()  # not yet removed
    assert mailboxes[2].beats() == {rank: Beat(10, rank + 0.25) for rank in range(3)}
    assert mailboxes[1].heartbeats() == {rank: {"step": 10 + rank} for rank in range(3)}


def test_a_heartbeat_that_cannot_be_written_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox = _mailboxes(tmp_path, 1)[0]
    before = mailbox.post_heartbeat(1, 0.0, {"step": 1})

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert mailbox.post_heartbeat(2, 0.0, {"step": 2}, before=before) == before
    assert mailbox.heartbeats() == {0: {"step": 1}}


def test_a_rank_that_does_not_see_the_folder_speaks_for_itself(tmp_path: Path) -> None:
    mailbox = dataclasses.replace(_mailboxes(tmp_path, 1)[0], folder=None)
    mailbox.post_statement(_of(mailbox, FAILED))
    mailbox.post_heartbeat(1, 0.0, {"step": 1})
    assert not mailbox.has_statements() and mailbox.statements({}) == [] and mailbox.heartbeats() == {}
    assert mailbox.claim_card(0) and not mailbox.is_reported() and not mailbox.has_finished(0)


def test_only_ranks_that_see_the_folder_read_each_others_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_mounted_on_rank_1(comm: Comm, action: Callable[[], str], *, name: str) -> str:
        place = on_rank_0(comm, action, name=name)
        return place if comm.rank != 1 else str(tmp_path / "not mounted")

    monkeypatch.setattr("hvdtrain.observe.failure.mailbox.on_rank_0", not_mounted_on_rank_1)
    assert [sorted(mailbox.reachable) for mailbox in _mailboxes(tmp_path)] == [[0, 2], [], [0, 2]]
    (tmp_path / "run").write_text("")
    assert [mailbox.folder for mailbox in _mailboxes(tmp_path / "run")] == [None] * 3, "it cannot be made"


def test_dead_ranks_are_reported_unless_they_left(tmp_path: Path) -> None:
    mailbox = _mailboxes(tmp_path, 1)[0]
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    other = RankProcess(1, "a", child.pid, started(child.pid) or 0)
    mailbox = dataclasses.replace(mailbox, ranks=(mailbox.process, other), visible=frozenset({1}))
    assert mailbox.states() == {1: RUNNING}
    child.communicate()
    assert mailbox.states() == {1: GONE}
    dataclasses.replace(mailbox, process=other).mark_finished()
    assert mailbox.states() == {}
    assert dataclasses.replace(mailbox, folder=None).states() == {1: GONE}, "without the others' reports"


def test_only_processes_that_are_found_at_start_are_looked_for(tmp_path: Path) -> None:
    def body(comm: Comm) -> Mailbox:
        who = this_process(comm.rank, "a" if comm.rank < 3 else "b")
        foreign = msgspec.structs.replace(who, began=who.began + 1)  # the number is another's in this container
        return open_mailbox(tmp_path, comm, foreign if comm.rank == 2 else who)

    assert [sorted(mailbox.visible) for mailbox in on_ranks(4, body)] == [[1], [0], [0, 1], []]


def test_python_writes_where_native_code_crashed(tmp_path: Path) -> None:
    mailbox = _mailboxes(tmp_path, 1)[0]
    program = (
        "import ctypes, sys\nfrom pathlib import Path\n"
        "from hvdtrain.observe.failure.mailbox import Mailbox, crash_notes\n"
        "from hvdtrain.observe.failure.statement import this_process\n"
        "who = this_process(0, 'a')\n"
        "with crash_notes(Mailbox(Path(sys.argv[1]), who, (who,), frozenset(), frozenset())):\n"
        "    ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(mailbox.folder)], cwd=ROOT)
    assert done.returncode < 0
    assert "Segmentation fault" in mailbox.crash_text(0) and "string_at" in mailbox.crash_text(0)


def test_no_rank_is_missed_while_the_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailboxes = _mailboxes(tmp_path)
    for mailbox in mailboxes:
        mailbox.mark_finished()
    looked: list[bool] = []
    rmtree = shutil.rmtree

    def slowly(folder: Path, **how: Any) -> None:
        for path in folder.glob("*/left/*"):
            path.unlink()
        looked.extend(mailboxes[1].has_finished(mailbox.process.rank) for mailbox in mailboxes)
        rmtree(folder, **how)

    monkeypatch.setattr("hvdtrain.observe.failure.mailbox.shutil.rmtree", slowly)
    mailboxes[0].remove()
    assert looked == [True] * 3
    assert not list(tmp_path.iterdir())
