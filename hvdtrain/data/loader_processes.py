"""The processes of torch's DataLoader: their signals, their end, and the error if one dies."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TypeVar

from hvdtrain.errors import TransientDataError
from hvdtrain.launch.job_end import describe_exit

T = TypeVar("T")

_MOMENT_S = 5.0  # seconds between the loss of a connection to a loader process and its end

_processes: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def batches_of_processes(batches: Iterator[T], processes: Sequence[BaseProcess]) -> Iterator[T]:
    """Return the batches of loader processes, and let these end with the rank, or with `batches`.

    They are killed first: torch and multiprocessing send SIGTERM, which they block, and wait seconds for each. The word
    by which torch ends them is lost where `batches` is collected as a part of a cycle.

    Errors: TransientDataError: a loader process has died. torch's own error only names a later effect.
    """
    if not _processes.issuperset(processes):
        _processes.update(processes)
        weakref.finalize(batches, _kill, tuple(processes)).atexit = False
        atexit.unregister(_kill)
        atexit.register(_kill, _processes)  # the last to be registered runs first: before torch's
    return _convert_errors(batches, processes)


def _convert_errors(batches: Iterator[T], processes: Sequence[BaseProcess]) -> Iterator[T]:
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            ended = [] if str(error).startswith("Caught ") else _exit_codes(processes)  # an exception from the data set
            if not ended:
                raise
            raise TransientDataError(
                "a loader process has died",
                expected="samples, or an exception",
                found=", ".join(map(describe_exit, ended)),
                next_step="use --loader.workers 0 to load samples in the rank itself, which shows the cause",
            ) from error
        yield batch


def _exit_codes(processes: Sequence[BaseProcess]) -> list[int]:
    """Return the exit codes of processes that have ended, or end within a moment."""
    deadline = time.monotonic() + _MOMENT_S
    while not (found := [p.exitcode for p in processes if p.exitcode is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals that ask a rank to save or stop, for processes that start in this context.

    mpirun, a scheduler and a terminal send them to all processes of a group, and a loader process would die.
    """
    notices = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    try:
        # First, because its start unblocks two of them (resource_tracker.py).
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, notices)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_rank(_worker: int) -> None:
    """End this loader process when its rank has ended, even by SIGKILL.

    torch watches the process that forked it. Here that is the fork server, which lives as long as its children.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None

    def watch() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
