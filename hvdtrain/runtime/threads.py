"""Threads of this process that others started: which of them spins, and keeping that one out of the way. Linux only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOKS = 40
_BETWEEN_S = 0.005
_LEAST_LOOKS = 4
_MOST_SLEEPS = 3

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Use:
    """What a thread has used of the processors since it began.

    Attributes:
        busy_ns: time it ran.
        sleeps: how often it gave its core up to wait for something.
    """

    busy_ns: int
    sleeps: int


def thread_ids() -> frozenset[int]:
    """The kernel's numbers of this process's threads; empty where there is no ``/proc``."""
    try:
        return frozenset(int(task.name) for task in _TASKS.iterdir())
    except OSError:
        return frozenset()


def read_use(thread: int) -> Use:
    """Read what a thread has used.

    Errors:
        OSError, ValueError: the thread is gone, or this kernel does not keep such figures.
    """
    folder = _TASKS / str(thread)
    status = dict(line.partition(":")[::2] for line in (folder / "status").read_text().splitlines())
    busy_ns = int((folder / "schedstat").read_text().split()[0])
    return Use(busy_ns, int(status.get("voluntary_ctxt_switches", "x")))


def find_spinner(
    threads: Iterable[int],
    use: Callable[[int], Use] = read_use,
    pause: Callable[[], None] = lambda: time.sleep(_BETWEEN_S),
) -> int | None:
    """Find the one thread among `threads` that runs without ever sleeping; looks for some 20 to 200 ms.

    A thread that waits for a message in a loop may run for long without sleeping; but it has slept before. None where
    no thread or more than one looks so, or where the kernel does not tell.
    """
    try:
        first = {thread: use(thread) for thread in threads}
        for look in range(_LOOKS):
            pause()
            now = {thread: use(thread) for thread in first}
            found = [t for t in now if now[t].busy_ns > first[t].busy_ns and now[t].sleeps == first[t].sleeps]
            found = [t for t in found if now[t].sleeps <= _MOST_SLEEPS]
            if len(found) == 1 and look + 1 >= _LEAST_LOOKS:
                return found[0]
    except (OSError, ValueError):
        pass
    return None


class Spinner:
    """A thread that spins, and what keeps it from taking time that others need: the Timeline's of many a Horovod.

    At rest it runs only on cores that nobody else wants (SCHED_IDLE). It must not be at rest while others wait for
    it: where ranks fill the cores it gets a few ms in a second then, and may hold a mutex all the while.

    Without the right to raise priorities (CAP_SYS_NICE, or RLIMIT_NICE of 20) rest is for good; so it is taken only
    when the thread has nothing to do any more.

    Args:
        thread: the kernel's number of it.
        can_return: whether a thread at rest can be made to work again; tried out where not given.
    """

    def __init__(self, thread: int, can_return: bool | None = None) -> None:
        self._thread = thread
        self._can_return = can_return_from_rest() if can_return is None else can_return
        # A launcher that binds ranks to cores has bound this thread to those of its rank: let it go to others.
        with suppress(OSError):
            os.sched_setaffinity(thread, range(os.cpu_count() or 1))

    def rest(self, *, for_good: bool) -> None:
        """Let it run only where nothing else does. `for_good`: nobody will wait for it but at the end."""
        if for_good or self._can_return:
            with suppress(OSError):
                _set_policy(self._thread, os.SCHED_IDLE)

    def work(self) -> None:
        """Let it run as other threads do, where that is possible."""
        with suppress(OSError):
            _set_policy(self._thread, os.SCHED_OTHER)


def can_return_from_rest() -> bool:
    """Whether this process may give a thread at rest its old priority back: tried with a thread that sleeps."""
    over = threading.Event()
    subject = threading.Thread(target=over.wait, daemon=True)
    subject.start()
    try:
        assert subject.native_id is not None
        _set_policy(subject.native_id, os.SCHED_IDLE)
        _set_policy(subject.native_id, os.SCHED_OTHER)
    except OSError:
        return False
    finally:
        over.set()
    return True


def _set_policy(thread: int, policy: int) -> None:
    os.sched_setscheduler(thread, policy, os.sched_param(0))


def give_way(nice: str) -> None:
    """Lower the priority of this thread, and of those that it starts from now on, to at least `nice`.

    Where that cannot be done, or is asked for in another way than by a number above 0, nothing happens.
    """
    with suppress(OSError, ValueError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(int(nice), os.getpriority(os.PRIO_PROCESS, thread)))
