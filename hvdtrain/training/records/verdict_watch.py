"""Say while a run trains what becomes slow, by a process of its own at the lowest priority, which delays no step."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.timeline.report.terminal import changed

_PATIENCE_S = 600.0
_REST = 100  # least time between two looks, in times the CPU time of the last: they take 1% of a core at most


@dataclass
class VerdictWatch:
    """A watcher that looks every `every_s` seconds, in a thread, until closed; on rank 0."""

    run: Path  # the folder
    every_s: float
    say: Callable[[str], None]  # shows a line; any thread calls it
    event: Callable[[dict[str, Any]], None]  # records one; any thread calls it
    show: Callable[[dict[str, Any]], None]  # receives an event ``look`` for sinks after each; any thread calls it
    _ended: threading.Event = field(default_factory=threading.Event)
    _step: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="verdicts", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> None:
        """Note that step `step` begins."""
        self._step = step

    def close(self) -> None:
        """Stop, also a look that is under way."""
        self._ended.set()
        if (process := self._process) is not None:
            process.kill()

    def _watch(self) -> None:
        before: dict[str, str] = {}
        after_s = self.every_s
        while not self._ended.wait(after_s):
            found = self._look()
            if self._ended.is_set() or found is None:
                continue
            after_s = max(self.every_s, _REST * found.pop("cpu_s"))
            self.show({"event": "look", "at_step": self._step, **found})
            for text in changed(before, found["verdicts"]):
                self.say(text)
                self.event({"event": "verdict", "at_step": self._step, "text": text})
            before = found["verdicts"]
        self._stop()

    def _look(self) -> dict[str, Any] | None:
        """Return `verdicts`, `goodput` and `cpu_s`; None if they are unknown. The program looks when it starts, too."""
        with suppress(OSError, ValueError):  # it has ended, or cannot be started
            if (process := self._process) is None:
                watch = ("-m", "hvdtrain", "timeline", "watch", str(self.run), "--asked", "--json")
                argv = ["nice", "-n", "19", sys.executable, *watch]
                pipe, null = subprocess.PIPE, subprocess.DEVNULL
                process = self._process = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=null)
            elif process.stdin is not None:
                process.stdin.write(b"\n")
            patience = threading.Timer(_PATIENCE_S, process.kill)
            patience.daemon = True
            patience.start()
            assert process.stdout is not None
            try:
                found = json.loads(process.stdout.readline())
            finally:
                patience.cancel()
            return {key: found[key] for key in ("verdicts", "goodput", "cpu_s")}
        self._stop()
        return None

    def _stop(self) -> None:
        """End the program, so that the next look starts it again."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.__exit__(None, None, None)
