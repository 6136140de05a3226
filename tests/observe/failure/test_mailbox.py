"""Files between ranks: each sees what the others left; one alone claims a card."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.observe.failure.fault import Fault
from hvdtrain.observe.failure.mailbox import Mailbox, open_post
from hvdtrain.observe.failure.process import GONE, RUNNING, started
from hvdtrain.observe.failure.statement import FAILED, HERE, STALLED, Statement, Who, myself
from tests.support.launch import ROOT
from tests.support.thread_comm import on_ranks


def _posts(directory: Path, size: int = 3) -> list[Mailbox]:
    def body(comm: Comm) -> Mailbox:
        return open_post(directory, comm, myself(comm.rank, "a"))

    return on_ranks(size, body)


def _of(post: Mailbox, kind: str, **facts: object) -> Statement:
    return Statement(kind, 1.0, post.who, **facts)  # type: ignore[arg-type]


def test_every_rank_sees_what_the_others_said(tmp_path: Path) -> None:
    posts = _posts(tmp_path)
    assert all(post.reachable == {0, 1, 2} for post in posts)
    assert not any(post.anyone_spoke() for post in posts)
    said = [
        _of(posts[0], HERE, open=[("wait", 1.5)], in_flight={"x": 1.0}, stacks={"training": ["a"]}),
        _of(posts[2], FAILED, fault=Fault("ValueError", "no")),
    ]
    for post, statement in zip((posts[0], posts[2]), said, strict=True):
        post.say(statement)
    assert all(post.anyone_spoke() for post in posts)
    assert all(post.statements() == said for post in posts)


def test_of_several_statements_of_a_rank_the_one_that_says_more_counts(tmp_path: Path) -> None:
    post = _posts(tmp_path, 1)[0]
    for kind in (STALLED, FAILED, HERE):
        post.say(_of(post, kind))
    assert [s.kind for s in post.statements()] == [FAILED]


def test_one_rank_alone_claims_a_card(tmp_path: Path) -> None:
    posts = _posts(tmp_path, 8)
    with ThreadPoolExecutor(8) as pool:
        for number in range(20):
            claims = list(pool.map(lambda post, number=number: post.claim(number), posts))
            assert sum(claims) == 1


def test_what_a_start_before_left_is_gone(tmp_path: Path) -> None:
    before = _posts(tmp_path, 1)[0]
    before.say(_of(before, FAILED))
    before.tell()
    after = _posts(tmp_path, 1)[0]
    assert not after.anyone_spoke() and not after.told()
    assert before.folder != after.folder
    assert before.has_left(0), "who still looks at the old place misses nobody there"
    after.remove()
    assert not (tmp_path / ".ranks").exists()


def test_what_is_half_written_or_strange_is_passed_over(tmp_path: Path) -> None:
    post = _posts(tmp_path, 1)[0]
    assert post.folder is not None
    (post.folder / "said/00001.failed").write_text('{"kind"')
    assert post.statements() == []
    assert post.anyone_spoke()


def test_a_rank_that_does_not_see_the_folder_speaks_for_itself(tmp_path: Path) -> None:
    post = dataclasses.replace(_posts(tmp_path, 1)[0], folder=None)
    post.say(_of(post, FAILED))
    post.beat({"step": 1})
    assert not post.anyone_spoke() and post.statements() == [] and post.beats() == {}
    assert post.claim(0) and not post.told() and not post.has_left(0)


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert [post.folder for post in _posts(tmp_path / "run")] == [None] * 3


def test_ranks_that_are_gone_are_seen_unless_they_left(tmp_path: Path) -> None:
    post = _posts(tmp_path, 1)[0]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = Who(1, "a", child.pid, started(child.pid) or 0)
    post = dataclasses.replace(post, ranks=(post.who, other), visible=frozenset({1}))
    assert post.states() == {1: RUNNING}
    child.communicate(b"\n")
    assert post.states() == {1: GONE}
    dataclasses.replace(post, who=other).leave()
    assert post.states() == {}


def test_only_processes_that_are_found_at_start_are_looked_for(tmp_path: Path) -> None:
    def body(comm: Comm) -> Mailbox:
        who = myself(comm.rank, "a" if comm.rank < 3 else "b")
        foreign = dataclasses.replace(who, began=who.began + 1)  # the number is another's in this container
        return open_post(tmp_path, comm, foreign if comm.rank == 2 else who)

    assert [sorted(post.visible) for post in on_ranks(4, body)] == [[1], [0], [0, 1], []]


def test_python_writes_where_native_code_crashed(tmp_path: Path) -> None:
    post = _posts(tmp_path, 1)[0]
    program = (
        "import ctypes, sys\nfrom pathlib import Path\n"
        "from hvdtrain.observe.failure.mailbox import Mailbox, crash_notes\n"
        "from hvdtrain.observe.failure.statement import myself\n"
        "who = myself(0, 'a')\n"
        "with crash_notes(Mailbox(Path(sys.argv[1]), who, (who,), frozenset(), frozenset())):\n"
        "    ctypes.string_at(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(post.folder)], cwd=ROOT)
    assert done.returncode < 0
    assert "Segmentation fault" in post.fatal(0) and "string_at" in post.fatal(0)


def test_no_rank_is_missed_while_the_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts = _posts(tmp_path)
    for post in posts:
        post.leave()
    looked: list[bool] = []
    rmtree = shutil.rmtree

    def slowly(folder: Path, **how: Any) -> None:
        for path in folder.glob("*/left/*"):
            path.unlink()
        looked.extend(posts[1].has_left(post.who.rank) for post in posts)
        rmtree(folder, **how)

    monkeypatch.setattr("hvdtrain.observe.failure.mailbox.shutil.rmtree", slowly)
    posts[0].remove()
    assert looked == [True] * 3
    assert not list(tmp_path.iterdir())


def test_without_a_folder_a_dead_process_is_seen_and_nobody_else_is_heard(tmp_path: Path) -> None:
    post = dataclasses.replace(_posts(tmp_path, 1)[0], folder=None, reachable=frozenset({0, 1}))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        began = started(child.pid) or 0
    post = dataclasses.replace(post, ranks=(post.who, Who(1, "a", child.pid, began)), visible=frozenset({1}))
    assert post.states() == {1: GONE}
    assert not post.hears(1)


def test_a_statement_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posts, read = _posts(tmp_path), list[str]()
    get = Mailbox._get
    monkeypatch.setattr(Mailbox, "_get", lambda post, name: read.append(name) or get(post, name))  # type: ignore[func-returns-value]
    known: dict[str, Statement] = {}
    for post, kind in ((posts[0], HERE), (posts[1], HERE), (posts[0], FAILED)):
        post.say(_of(post, kind))
        posts[2].statements(known)
    assert sorted(read) == ["said/00000.failed", "said/00000.here", "said/00001.here"]
    assert [s.kind for s in posts[2].statements(known)] == [FAILED, HERE]


@pytest.mark.parametrize("size", [1, 8, 128, 4096])
def test_many_ranks_look_less_often(size: int, tmp_path: Path) -> None:
    post = _posts(tmp_path, 1)[0]
    post = dataclasses.replace(post, ranks=post.ranks * size)
    assert post.every_s(0.5) >= 0.5
    assert size / post.every_s(0.05) <= 200
