"""Find threads of this process that spin, and lower their priority; wake threads that wait on sockets. Linux only."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOKS = 40
_BETWEEN_S = 0.005
_LEAST_LOOKS = 4
_MOST_SLEEPS = 3

_PROC = Path("/proc")

_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class ThreadUse:
    """CPU use of a thread since its start: the time it ran, and how often it gave up its core to wait."""

    busy_ns: int
    sleeps: int


def thread_ids(process: int | str = "self") -> frozenset[int]:
    """Return the kernel's ids of a process's threads; empty without ``/proc``, or if it has ended."""
    try:
        return frozenset(int(task.name) for task in (_PROC / str(process) / "task").iterdir())
    except OSError:
        return frozenset()


def read_use(thread: int) -> ThreadUse:
    """Read the CPU use of a thread. Errors: OSError, ValueError if it has ended, or this kernel has no such figures."""
    folder = _PROC / "self/task" / str(thread)
    status = dict(line.partition(":")[::2] for line in (folder / "status").read_text().splitlines())
    busy_ns = int((folder / "schedstat").read_text().split()[0])
    return ThreadUse(busy_ns, int(status.get("voluntary_ctxt_switches", "x")))


def find_spinning_thread(
    threads: Iterable[int],
    use: Callable[[int], ThreadUse] = read_use,
    pause: Callable[[], None] = lambda: time.sleep(_BETWEEN_S),
) -> int | None:
    """Find the only thread among `threads` that runs without ever sleeping; takes 20 to 200 ms.

    A thread that polls for a message may run long without sleeping, but has slept before. None where no thread or more
    than one qualifies, or where the kernel has no figures.
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


class SpinningThread:
    """A spinning thread, and control of its priority: that of the Timeline's writer in many builds of Horovod.

    At rest it runs only on idle cores (SCHED_IDLE). It must not rest while others wait for it: where ranks fill the
    cores it gets a few ms per second, and may hold a mutex all that time.

    Without the right to raise priorities (CAP_SYS_NICE, or RLIMIT_NICE of 20) it cannot return from rest, so it rests
    only when it has no more work.

    ``thread`` is the kernel's id; ``can_restore``: whether it can return from rest (default: tested).
    """

    def __init__(self, thread: int, can_restore: bool | None = None) -> None:
        self._thread = thread
        self._can_restore = can_restore_priority() if can_restore is None else can_restore
        # A launcher may have bound this thread to the cores of its rank: allow all cores.
        with suppress(OSError):
            os.sched_setaffinity(thread, range(os.cpu_count() or 1))

    def lower_priority(self, *, for_good: bool) -> None:
        """Let it run only on idle cores. `for_good`: nobody waits for it before the end."""
        if for_good or self._can_restore:
            with suppress(OSError):
                _set_policy(self._thread, os.SCHED_IDLE)

    def restore_priority(self) -> None:
        """Restore its normal priority, where possible."""
        with suppress(OSError):
            _set_policy(self._thread, os.SCHED_OTHER)


def can_restore_priority() -> bool:
    """Test with a sleeping thread whether this process may raise a priority back to normal."""
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


def lower_priority(threads: Iterable[int]) -> None:
    """Give threads the lowest priority, where possible: on a core that computes, they get about 1.5% of it."""
    for thread in threads:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 19)


def lower_own_priority(nice: str) -> None:
    """Lower the priority of this thread, and of threads that it starts later, to at least `nice`.

    Does nothing where that is not possible, or `nice` is not a positive number.
    """
    with suppress(OSError, ValueError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(int(nice), os.getpriority(os.PRIO_PROCESS, thread)))


def open_sockets() -> dict[int, int]:
    """Return the file descriptors of this process's sockets by inode, which is unique while a socket is open."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # the descriptor for reading this folder is closed by now
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(entry.name)
    return found


def shut_down_receiving(inodes: Collection[int]) -> int:
    """Shut down receiving on the TCP connections among `inodes`; return their number. Waiting threads get an EOF.

    Sending still works: Gloo reports no failed send while it answers the other end, and the waiting rank would wait
    until its timeout. The sockets stay open for their owner to close. Other sockets are not touched.
    """
    count = 0
    now = open_sockets()
    for inode in inodes:
        if inode in now:
            with suppress(OSError), socket.socket(fileno=os.dup(now[inode])) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.shutdown(socket.SHUT_RD)
                    count += 1
    return count
