from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from hvdtrain.runtime import threads


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
    before_ns = threads.read_busy_ns(own)
    while threads.read_busy_ns(own) == before_ns:
        time.sleep(1e-3)  # what a thread used is not always counted at once
    assert threads.read_busy_ns(own) > before_ns > 0


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
