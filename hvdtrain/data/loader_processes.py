"""The processes of torch's DataLoader: which signals they hear, how they end, and what is said of one that is lost."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TypeVar
from weakref import WeakSet

from hvdtrain.errors import DataError
from hvdtrain.launch.job_end import describe_exit

T = TypeVar("T")

_MOMENT_S = 5.0
"""From when a connection to a loader process breaks until that has ended."""

_processes: WeakSet[BaseProcess] = WeakSet()


def _kill_processes() -> None:
    """Before the interpreter ends: multiprocessing ends them by SIGTERM, which they do not hear, and waits for them."""
    for process in _processes:
        process.kill()


atexit.register(_kill_processes)


def watched(batches: Iterator[T], processes: Sequence[BaseProcess]) -> Iterator[T]:
    """Return the batches that loader processes make, which end with the rank.

    Errors:
        DataError: a loader process has ended; torch's own error says of it what broke last, such as a connection.
    """
    _processes.update(processes)
    return _watched(batches, processes)


def _watched(batches: Iterator[T], processes: Sequence[BaseProcess]) -> Iterator[T]:
    while True:
        try:
            drawn = next(batches)
        except StopIteration:
            return
        except Exception as error:
            ended = [] if str(error).startswith("Caught ") else _exit_codes(processes)  # an exception of the data set's
            if not ended:
                raise
            raise DataError(
                "a loader process has ended amid its work",
                expected="samples, or an exception",
                found=", ".join(map(describe_exit, ended)),
                next_step="--loader.workers 0 makes samples in the rank itself, where it shows what ends them",
            ) from error
        yield drawn


def _exit_codes(processes: Sequence[BaseProcess]) -> list[int]:
    """Of those that have ended, or do so within a moment."""
    deadline = time.monotonic() + _MOMENT_S
    while not (found := [p.exitcode for p in processes if p.exitcode is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Let processes started within never see the signals that mean a rank to save or to stop.

    mpirun, a scheduler and a terminal send them to all processes of a group; a loader process would die of them.
    """
    notices = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    try:
        # Its start unblocks two of them (resource_tracker.py), so it comes first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, notices)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_rank(_worker: int) -> None:
    """End this loader process when its rank has ended, by SIGKILL too.

    torch watches the process that forked a loader process: here the fork server, which lives as long as its children.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
