from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.runtime import threads

SPINS, SLEEPS, IDLES, WAITS_BUSILY, IS_YOUNG = 1, 2, 3, 4, 5


def _uses(looks: int = 0) -> Callable[[int], threads.ThreadUse]:
    """Threads of all kinds: what each has used by its n-th look."""
    count: dict[int, int] = {}

    def use(thread: int) -> threads.ThreadUse:
        n = count[thread] = count.get(thread, -1) + 1
        return {
            SPINS: threads.ThreadUse(5_000_000 * max(0, n - looks), 1),
            SLEEPS: threads.ThreadUse(1_000_000 * n, 100 + n),
            IDLES: threads.ThreadUse(500, 2),
            WAITS_BUSILY: threads.ThreadUse(5_000_000 * n, 40),
            IS_YOUNG: threads.ThreadUse(1_000_000 * n, n // 2),
        }[thread]

    return use


@pytest.mark.parametrize("starved", [0, 10])
def test_the_one_that_never_sleeps_is_found(starved: int) -> None:
    """Also when it got no core for a while, and another thread waits in a loop all the time."""
    every = [SPINS, SLEEPS, IDLES, WAITS_BUSILY, IS_YOUNG]
    assert threads.find_spinning_thread(every, _uses(starved), lambda: None) == SPINS


def test_none_is_found_where_none_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for others in ([], [SLEEPS, IDLES], [WAITS_BUSILY], [IS_YOUNG]):
        assert threads.find_spinning_thread(others, _uses(), lambda: None) is None
    use = _uses()
    alike = threads.find_spinning_thread([1, 9], lambda thread: use(SPINS), lambda: None)
    assert alike is None, "two that look alike are both left alone"
    assert threads.find_spinning_thread([2**22 + 1], threads.read_use, lambda: None) is None, "it has ended"
    monkeypatch.setattr(threads, "_PROC", tmp_path / "none")
    assert threads.thread_ids() == frozenset()


@pytest.fixture
def sleeper() -> Iterator[int]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    over.set()
    thread.join()


def test_a_threads_use_is_read_from_the_kernel(sleeper: int) -> None:
    own = threading.get_native_id()
    assert {sleeper, own} <= threads.thread_ids()
    before = threads.read_use(own)
    while threads.read_use(own).sleeps == before.sleeps or threads.read_use(own).busy_ns == before.busy_ns:
        time.sleep(1e-3)  # what a thread used is not always counted at once
    assert threads.read_use(own).busy_ns > before.busy_ns > 0


_policy = os.sched_getscheduler


def test_rest_and_work_change_that_thread_alone(sleeper: int) -> None:
    if not threads.can_restore_priority():
        pytest.skip("this process may not raise priorities")
    own = _policy(0)
    spinner = threads.SpinningThread(sleeper)
    spinner.lower_priority(for_good=False)
    assert (_policy(sleeper), _policy(0)) == (os.SCHED_IDLE, own)
    spinner.restore_priority()
    assert (_policy(sleeper), _policy(0)) == (os.SCHED_OTHER, own)


def test_where_rest_is_for_good_it_comes_last(sleeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, policy: int, param: object) -> None:
        if policy != os.SCHED_IDLE:
            raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setscheduler", refuse)
        assert not threads.can_restore_priority()
    spinner = threads.SpinningThread(sleeper, can_restore=False)
    spinner.lower_priority(for_good=False)
    assert _policy(sleeper) == os.SCHED_OTHER
    spinner.lower_priority(for_good=True)
    assert _policy(sleeper) == os.SCHED_IDLE
    ended = threads.SpinningThread(2**22 + 1, can_restore=True)
    ended.lower_priority(for_good=True)
    ended.restore_priority()


def test_the_spinner_may_leave_the_cores_that_its_rank_is_bound_to(sleeper: int) -> None:
    every = os.sched_getaffinity(sleeper)
    os.sched_setaffinity(sleeper, {min(every)})
    threads.SpinningThread(sleeper, can_restore=False)
    assert os.sched_getaffinity(sleeper) >= every, "all cores of the host, where this process has fewer"


@pytest.mark.parametrize(("asked", "raised_by"), [("10", 10), ("", 0), ("no number", 0), ("-5", 0)])
def test_computing_gives_way_and_so_do_the_threads_it_starts(asked: str, raised_by: int) -> None:
    """In a thread that ends: a priority that was lowered cannot always be raised again."""
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def compute() -> None:
        look()
        threads.lower_own_priority(asked)
        look()
        child = threading.Thread(target=look)
        child.start()
        child.join()

    computing = threading.Thread(target=compute)
    computing.start()
    computing.join()
    before, after, of_child = found
    assert after == of_child == max(before, raised_by)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
