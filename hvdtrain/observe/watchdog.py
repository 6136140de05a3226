"""A thread in each rank that sees when the run makes no progress, when a rank is gone, and when one has failed.

It works while the training thread is blocked: Horovod lets go of Python's interpreter lock while it waits. Horovod's
own stall inspector does not speak when a rank is stopped, since that blocks the exchange it is part of.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hvdtrain.observe.failure import process
from hvdtrain.observe.failure.failure_output import to_stderr
from hvdtrain.observe.failure.reporter import Reporter
from hvdtrain.observe.failure.statement import WATCHDOG_THREAD
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.clock import steady_s

EXIT_STALLED = 124
"""Exit code of a rank that ended because there was no progress: that of timeout(1)."""
EXIT_FAILED = 1

_LOOK_EVERY_S = 0.5
_LOOK_AGAIN_S = 0.05
_FAULTS = 5
"""So many looks in a row that do not succeed, and the watchdog gives up."""
_BEAT_EVERY_S = 10.0
_SUSPENDED_S = 5.0
_TOLD_GRACE_S = 10.0


class Patience:
    """How long ranks have made no progress, less what they could not: a job that was suspended as a whole and goes on.

    All of it by this rank's own clock, which never jumps: of other ranks it counts when a new beat of theirs was found.

    Args:
        timeout_s: how long is too long; 0 for never.
        now_s: the time at the start, by a clock that goes on while the process is stopped.
        look_every_s: how often it is asked.
    """

    def __init__(self, timeout_s: float, now_s: float, look_every_s: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self._suspended_s = max(_SUSPENDED_S, 5 * look_every_s)
        self._looked = now_s
        self._since = now_s
        self._moved: dict[int, tuple[Any, float]] = {}

    def idle_s(self, idle_s: float, now_s: float) -> float:
        """Seconds without progress that count, where the training thread has made none for `idle_s`."""
        if now_s - self._looked > self._suspended_s:  # this thread looks far oftener: the whole process stood still
            self._since = now_s
            self._moved.clear()
        self._looked = now_s
        return min(idle_s, now_s - self._since)

    def over(self, idle_s: float, beats: dict[int, dict[str, Any]], now_s: float) -> bool:
        """Whether to end the run: idle for too long, and no other rank has moved since.

        To be asked from before that on, as often as others leave word of themselves: of a beat found for the first
        time nobody knows how old it is, and it counts as new.

        Args:
            idle_s: of this rank, as counted above.
            beats: what the other ranks last left of themselves: "beat", another number each time; "idle_s", for how
                long they had made no progress then.
            now_s: by the clock of `idle_s`.
        """
        for rank, beat in beats.items():
            number, idle = beat.get("beat"), beat.get("idle_s")
            if idle is not None and (rank not in self._moved or self._moved[rank][0] != number):
                self._moved[rank] = number, now_s - idle
        if not self.timeout_s or idle_s < self.timeout_s:
            return False
        return not any(now_s - moved_s < self.timeout_s for _, moved_s in self._moved.values())


class Watchdog:
    """A context manager: watches while the run is in it.

    On SIGTERM it is woken at once: mpirun sends it to those that are left when a rank died, and kills them a second
    later, while their training threads are blocked. The signal itself stays the training thread's.

    Args:
        reporter: tells.
        stall_timeout_s: seconds without progress on every rank after which the run is ended; 0 for never.
        end: ends this process.
        driven: whether a driver looks after ranks that are gone or have failed. Then nobody is missed here and no card
            is written for it, and another rank's failure does not end this one.
    """

    def __init__(
        self,
        reporter: Reporter,
        stall_timeout_s: float,
        end: Callable[[int], None] = os._exit,
        *,
        driven: bool = False,
    ) -> None:
        self._reporter = reporter
        self._look_every_s = reporter.post.every_s(_LOOK_EVERY_S)
        self._patience = Patience(stall_timeout_s, time.monotonic(), self._look_every_s)
        beat_every_s = max(_BEAT_EVERY_S, 2 * self._look_every_s)
        self._beat_every_s = min(beat_every_s, stall_timeout_s / 4 or beat_every_s)
        self._end = end
        self._driven = driven
        self._woken, self._wake = os.pipe()
        self._former_wake: int | None = None
        self._stop = threading.Event()
        self._next_beat = 0.0
        self._beats = 0
        self._next_question = 0.0
        self._spoken = False
        self._suspects: set[int] = set()
        self._told_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=WATCHDOG_THREAD, daemon=True)

    def __enter__(self) -> Watchdog:
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        if threading.current_thread() is threading.main_thread():
            self._former_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._former_wake is not None:
            signal.set_wakeup_fd(self._former_wake)
        with suppress(OSError):
            os.write(self._wake, b"\0")
        self._thread.join()
        os.close(self._woken)
        os.close(self._wake)

    def _run(self) -> None:
        faults = 0
        while not self._stop.is_set():
            try:
                with self._reporter.lock:
                    if self._reporter.over:
                        return
                    self._look()  # at once: a rank that is killed soon has left word of itself before
                faults = 0
                self._sleep()
            except Exception:  # what watches over the training must not harm it
                faults += 1
                if faults == _FAULTS:
                    to_stderr(f"hvdtrain: the watchdog has failed and watches no more:\n{traceback.format_exc()}")
                    return
                self._stop.wait(self._look_every_s)

    def _sleep(self) -> None:
        """Until the next look, or a signal."""
        poll = select.poll()  # select() takes no file descriptor beyond 1023
        poll.register(self._woken, select.POLLIN)
        if poll.poll(1000 * (_LOOK_AGAIN_S if self._suspects else self._look_every_s)):
            with suppress(OSError):
                os.read(self._woken, 1024)

    def _look(self) -> None:
        post, spans = self._reporter.post, self._reporter.witness.spans
        now = time.monotonic()
        idle_s = self._patience.idle_s(spans.idle_s(), now)
        if not self._driven and self._anyone_missing() and not post.told():
            self._reporter.missing()
            self._end(EXIT_FAILED)
        elif post.anyone_spoke():
            self._answer(now)
        elif now >= self._next_beat:
            self._next_beat = now + self._beat_every_s
            self._beats += 1
            about = {"time": steady_s(), "beat": self._beats, "idle_s": idle_s, "step": spans.step}
            post.beat(process.memory() | about)
        # Soon enough to know by the timeout which of the others' beats are old.
        early_s = min(self._patience.timeout_s, 2 * self._beat_every_s)
        if not early_s or idle_s < early_s or now < self._next_question:
            return
        self._next_question = now + self._beat_every_s  # what the others leave of themselves is not newer
        if self._patience.over(idle_s, self._others(), now):
            self._reporter.stalled()
            self._end(EXIT_STALLED)

    def _anyone_missing(self) -> bool:
        """Whether a rank was found dead twice in a row, and it is this rank's to say so.

        Without a folder nobody leaves word of its end, nor that a card is written: then no rank is missed in the end,
        and of those of a host the first that is left speaks.
        """
        post, before = self._reporter.post, self._suspects
        states = post.states()
        self._suspects = {rank for rank, state in states.items() if state in process.DEAD}
        missing = bool(before & self._suspects)
        if post.folder is None:
            first = all(rank > post.who.rank for rank in states.keys() - self._suspects)
            return missing and first and not self._reporter.job.ending
        return missing

    def _others(self) -> dict[int, dict[str, Any]]:
        own = self._reporter.witness.who.rank
        return {rank: beat for rank, beat in self._reporter.post.beats().items() if rank != own}

    def _answer(self, now: float) -> None:
        """Another rank spoke: say where this one is, once. If it is left behind by a failure, it ends too."""
        if not self._spoken:
            self._spoken = True
            self._reporter.say()
        if self._reporter.post.told() and not self._driven:
            self._told_at = self._told_at or now
            if now - self._told_at > _TOLD_GRACE_S:
                to_stderr(f"hvdtrain: the run has failed, see {RunLayout(self._reporter.job.run_dir).failure_text}\n")
                self._end(EXIT_FAILED)
