"""The process of a worker, in its own session, so that the agent can end all that it started; which workers compute."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hvdtrain.programs import read_stat
from hvdtrain.runtime.channel import HELD, LIFELINE, VARIABLE, Channel, Lifeline, make_lifeline

_MOST_CHARACTERS = 1 << 16  # of a forwarded line; longer lines are split

_LAST_WORDS_S = 1.0  # how long to wait for the end of a channel after its process

EVERY_S = 5.0
"""Between two measurements: each reads a file per process of this host."""

_BUSY = 0.25
"""Cores in use on average between two measurements; Horovod's threads use some hundredths while all ranks wait."""


class WorkerProcess:
    """A started process.

    Args:
        argv, folder: its command and working folder.
        environment: its whole environment, except the variables of its channel and its lifeline.
        report: called from threads with events: ``line`` (text, err), ``said`` (message), ``dying`` as soon as the
            kernel ends it, if it holds its lifeline, ``exited`` (code).

    Errors: OSError if it cannot be started.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], folder: str, report: Callable[..., None]
    ) -> None:
        ours, theirs = socket.socketpair()
        given = {VARIABLE: theirs.fileno()}
        self._lifeline = None
        if (made := make_lifeline()) is not None:
            self._lifeline, given[LIFELINE] = made
        try:
            self._process = subprocess.Popen(
                list(argv),
                env={**environment, **{name: str(number) for name, number in given.items()}},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=tuple(given.values()),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if made is not None:
                os.close(made[1])
        self.pid = self._process.pid
        self.channel = Channel(ours)  # closing it ends the worker
        self._report = report
        self._alive = threading.Lock()
        self._reaped = False
        self._readers: list[threading.Thread] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def start(self) -> None:
        """Start to report events."""
        for stream, err in ((self._process.stdout, False), (self._process.stderr, True)):
            assert stream is not None
            self._readers.append(threading.Thread(target=self._read, args=(stream, err), daemon=True))
        for thread in (*self._readers, self._listener, threading.Thread(target=self._wait, daemon=True)):
            thread.start()

    def send_signal(self, name: str) -> None:
        """Send a signal to the process alone."""
        self._send(lambda: os.kill(self.pid, signal.Signals[name]))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it and everything that it started."""
        self._send(lambda: os.killpg(self.pid, number))

    def kill_after(self, seconds: float) -> None:
        """Kill it after a time, if it is still alive."""
        if seconds <= 0:
            return self.kill()
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()

    def drain(self, timeout_s: float) -> None:
        """Wait until all its output is forwarded."""
        until_s = time.monotonic() + timeout_s
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))

    def is_drained(self) -> bool:
        """Check whether all its output is forwarded."""
        return not any(reader.is_alive() for reader in self._readers)

    def is_stopped(self) -> bool:
        """Check whether a signal has stopped it."""
        try:
            return read_stat(self.pid).state == "T"
        except OSError:
            return False

    def _send(self, act: Callable[[], None]) -> None:
        with self._alive, suppress(ProcessLookupError, PermissionError):
            if not self._reaped:  # afterwards another process may have its number
                act()

    def _wait(self) -> None:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.kill()  # its remaining children, which may hold the channel
        self._listener.join(_LAST_WORDS_S)  # report its last message before its exit
        self._report("exited", code=code)
        with self._alive:
            self._reaped = True
            self._process.wait()
        self.channel.close()

    def _listen(self) -> None:
        watcher = None
        for message in self.channel.messages():
            if message["type"] != HELD:
                self._report("said", message=message)
            elif self._lifeline is not None and watcher is None:
                watcher = threading.Thread(target=self._watch, args=(self._lifeline,), daemon=True)
                watcher.start()
        if watcher is not None:
            watcher.join()
            self._report("dying")  # after its last message

    def _watch(self, lifeline: Lifeline) -> None:
        if lifeline.wait():
            self.channel.stop_reading()

    def _read(self, stream: IO[bytes], err: bool) -> None:
        with stream:
            while line := stream.readline(_MOST_CHARACTERS):
                self._report("line", text=line.decode("utf-8", "replace").rstrip("\n"), err=err)


def find_work(leaders: Collection[int]) -> dict[int, tuple[float, list[int]]]:
    """Return of sessions, by their leaders, the CPU seconds and the processes."""
    import psutil  # takes 30 ms, which only agents need

    found = {leader: (0.0, list[int]()) for leader in leaders}
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            stat = read_stat(pid)
            if stat.session in found:
                cpu_s, pids = found[stat.session]
                found[stat.session] = (cpu_s + stat.cpu_s, [*pids, pid])
    return found


def waits_for_files(pid: int) -> bool:
    """Check whether a thread of a process waits for a disk or a file system."""
    with suppress(OSError):  # the process, or a thread of it, has ended
        return any(read_stat(int(e.name), e.parent).state == "D" for e in Path(f"/proc/{pid}/task").iterdir())
    return False


class BusyWorkers:
    """Finds workers that compute or wait for files, also in processes that they started. Each leads a session."""

    def __init__(self, read: Callable[[Collection[int]], Mapping[int, tuple[float, list[int]]]] = find_work) -> None:
        self._read = read
        self._found: Mapping[int, tuple[float, list[int]]] = {}
        self._looked_s = 0.0

    def find_busy(self, workers: Mapping[int, int], now_s: float) -> list[int]:
        """Return the workers that have worked since the last measurement; none less than `EVERY_S` after it.

        `workers`: process numbers by the workers' numbers.
        """
        passed_s = now_s - self._looked_s
        if passed_s < EVERY_S:
            return []
        before, self._found, self._looked_s = self._found, self._read(set(workers.values())), now_s
        known = {number: pid for number, pid in workers.items() if pid in before}
        computing = [n for n, pid in known.items() if self._found[pid][0] - before[pid][0] >= _BUSY * passed_s]
        return [n for n, pid in known.items() if n in computing or any(map(waits_for_files, self._found[pid][1]))]
