"""A thread in each rank that detects a stalled run, a dead rank and a failed rank.

It works while the training thread is blocked: Horovod releases Python's interpreter lock while it waits. Horovod's own
stall inspector reports nothing when a rank is stopped, because that blocks the exchange which the inspector is part of.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress

from hvdtrain.observe.failure import process_states
from hvdtrain.observe.failure.mailbox import Beat
from hvdtrain.observe.failure.reporter import Reporter
from hvdtrain.observe.failure.statement import WATCHDOG_THREAD
from hvdtrain.observe.output import to_stderr
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.clock import steady_s
from hvdtrain.spans import NESTED

EXIT_STALLED = 124
"""Exit code of a rank that ended because there was no progress, as of timeout(1)."""
EXIT_FAILED = 1

_POLL_S = 0.5
_FAST_POLL_S = 0.05
_WAITS = ("wait", *NESTED)
_MAX_ERRORS = 5
"""Failed polls in a row after which the watchdog gives up."""
_HEARTBEAT_S = 10.0
_SUSPENDED_S = 5.0
_REPORTED_GRACE_S = 10.0
_SLOW, _SLOW_STEPS = 3.0, 2
"""Factor on the timeout of the first steps, which may compile, and of evaluations."""
_WARNED = 0.5
"""Of the timeout: after this, a line says that there is no progress."""


class Patience:
    """Measures how long ranks have made no progress, without the time in which the whole job was suspended.

    It uses this rank's monotonic clock only, which also advances while the process is stopped: another rank's progress
    counts from when its new heartbeat was read. `timeout_s`: of no progress, 0 for never; `poll_s`: between calls.
    """

    def __init__(self, timeout_s: float, now_s: float, poll_s: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self._suspended_s = max(_SUSPENDED_S, 5 * poll_s)
        self._last_poll = now_s
        self._since = now_s
        self._progress: dict[int, tuple[int, float]] = {}

    def idle_s(self, idle_s: float, now_s: float) -> float:
        """Return the seconds without progress that count, of the `idle_s` of the training thread."""
        if now_s - self._last_poll > self._suspended_s:  # polls are far more frequent: all was suspended
            self._since = now_s
            self._progress.clear()
        self._last_poll = now_s
        return min(idle_s, now_s - self._since)

    def is_over(self, idle_s: float, beats: Mapping[int, Beat], now_s: float, times: float = 1.0) -> bool:
        """Return whether to end the run: idle for too long, and no other rank has made progress since.

        Call it as often as heartbeats are written, and begin before the timeout: the age of a heartbeat that is read
        for the first time is unknown, so it counts as new.

        `beats` are the last heartbeats of the other ranks. `times` is a factor on the timeout.
        """
        for rank, beat in beats.items():
            if rank not in self._progress or self._progress[rank][0] != beat.number:
                self._progress[rank] = beat.number, now_s - beat.idle_s
        timeout_s = times * self.timeout_s
        if not timeout_s or idle_s < timeout_s:
            return False
        return not any(now_s - progress_s < timeout_s for _, progress_s in self._progress.values())


class Watchdog:
    """Context manager that watches the run inside it.

    SIGTERM wakes it at once: when a rank dies, mpirun sends SIGTERM to the other ranks and kills them a second later,
    while their training threads are blocked. The training thread still handles the signal.

    It ends the run after `stall_timeout_s` seconds without progress on every rank; 0 for never. If it is `driven`, a
    driver handles dead and failed ranks: this rank reports no dead ranks, and does not end when another rank fails.
    """

    def __init__(
        self, reporter: Reporter, stall_timeout_s: float, end: Callable[[int], None] = os._exit, *, driven: bool = False
    ) -> None:
        self._reporter = reporter
        self._poll_s = reporter.mailbox.poll_interval_s(_POLL_S)
        self._patience = Patience(stall_timeout_s, time.monotonic(), self._poll_s)
        heartbeat_s = max(_HEARTBEAT_S, 2 * self._poll_s)
        self._heartbeat_s = min(heartbeat_s, stall_timeout_s / 4 or heartbeat_s)
        self._end = end
        self._driven = driven
        self._wake_read, self._wake_write = os.pipe()
        self._former_wake: int | None = None
        self._stop = threading.Event()
        self._next_beat = 0.0
        self._beats, self._beat = 0, ""  # the number and the name of the newest heartbeat
        self._next_check = 0.0
        self._posted = False
        self._suspects: set[int] = set()
        self._first_step = 0
        self._warned = False
        self._reported_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=WATCHDOG_THREAD, daemon=True)

    def __enter__(self) -> Watchdog:
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        if threading.current_thread() is threading.main_thread():
            self._former_wake = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._former_wake is not None:
            signal.set_wakeup_fd(self._former_wake)
        with suppress(OSError):
            os.write(self._wake_write, b"\0")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        errors = 0
        while not self._stop.is_set():
            try:
                with self._reporter.lock:
                    if self._reporter.error_raised:
                        return
                    self._poll()  # at once, so that a rank that is killed soon has written a heartbeat
                errors = 0
                self._sleep()
            except Exception:  # the watchdog must not harm the training
                errors += 1
                if errors == _MAX_ERRORS:
                    to_stderr(f"hvdtrain: the watchdog failed and has stopped:\n{traceback.format_exc()}")
                    return
                self._stop.wait(self._poll_s)

    def _sleep(self) -> None:
        """Sleep until the next poll or a signal."""
        poll = select.poll()  # select() accepts no file descriptor above 1023
        poll.register(self._wake_read, select.POLLIN)
        if poll.poll(1000 * (_FAST_POLL_S if self._suspects else self._poll_s)):
            with suppress(OSError):
                os.read(self._wake_read, 1024)

    def _poll(self) -> None:
        mailbox, spans = self._reporter.mailbox, self._reporter.statements.spans
        now = time.monotonic()
        idle_s = self._patience.idle_s(spans.idle_s(), now)
        if not self._driven and self._is_rank_dead() and not mailbox.is_reported():
            self._reporter.report_missing_rank()
            self._end(EXIT_FAILED)
        elif mailbox.has_statements():
            self._answer(now)
        elif now >= self._next_beat:
            self._next_beat = now + self._heartbeat_s
            self._beats += 1
            facts = process_states.memory() | {"time": steady_s(), "idle_s": idle_s, "step": spans.step}
            self._beat = mailbox.post_heartbeat(self._beats, idle_s, facts, before=self._beat)
        self._warn(idle_s)
        # Early enough to know at the timeout which heartbeats of other ranks are old.
        early_s = min(self._patience.timeout_s, 2 * self._heartbeat_s)
        if not early_s or idle_s < early_s or now < self._next_check:
            return
        self._next_check = now + self._heartbeat_s  # heartbeats of other ranks are not newer
        beats = mailbox.beats()
        beats.pop(self._reporter.statements.process.rank, None)
        if self._patience.is_over(idle_s, beats, now, self._times()):
            self._reporter.report_stall()
            self._end(EXIT_STALLED)

    def _times(self) -> float:
        """Return the factor on the timeout that holds now."""
        spans = self._reporter.statements.spans
        self._first_step = self._first_step or spans.step
        is_first = spans.step < self._first_step + _SLOW_STEPS
        return _SLOW if is_first or any(name == "evaluation" for name, _ in spans.open()) else 1.0

    def _warn(self, idle_s: float) -> None:
        """Say once that there is no progress: on the ranks that do not wait for others, and on rank 0."""
        spans, limit_s = self._reporter.statements.spans, self._times() * self._patience.timeout_s
        if not limit_s or idle_s < _WARNED * limit_s:
            self._warned = False
            return
        names = [name for name, _ in spans.open()]
        rank = self._reporter.statements.process.rank
        if self._warned or (rank and names and names[-1] in _WAITS):
            return
        self._warned = True
        where = f" in {names[-1]}" if names else ""
        to_stderr(
            f"hvdtrain: rank {rank}: no progress for {idle_s:.0f} s{where}, step {spans.step}; if no rank makes any for"
            f" {limit_s:.0f} s, the run ends (--observe.stall_timeout_s)\n"
        )

    def _is_rank_dead(self) -> bool:
        """Return whether two polls in a row found a dead rank that this rank must report.

        Without a shared folder ranks cannot record that they have finished or that a card is written. Then the first
        living rank of a host reports, and only before the run's end.
        """
        mailbox, before = self._reporter.mailbox, self._suspects
        states = mailbox.states()
        self._suspects = {rank for rank, state in states.items() if state in process_states.DEAD}
        dead = bool(before & self._suspects)
        if mailbox.folder is None:
            first = all(rank > mailbox.process.rank for rank in states.keys() - self._suspects)
            return dead and first and not self._reporter.job.is_ending()
        return dead

    def _answer(self, now: float) -> None:
        """Write this rank's statement once, after another rank has. End this rank some seconds after the card."""
        if not self._posted:
            self._posted = True
            self._reporter.post_state()
        if self._reporter.mailbox.is_reported() and not self._driven:
            self._reported_at = self._reported_at or now
            if now - self._reported_at > _REPORTED_GRACE_S:
                to_stderr(f"hvdtrain: the run failed, see {RunLayout(self._reporter.job.run_dir).failure_text}\n")
                self._end(EXIT_FAILED)
