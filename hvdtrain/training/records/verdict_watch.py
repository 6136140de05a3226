"""Says in a run's output what becomes slow, while it runs.

`hvdtrain timeline watch` looks, in a process of its own at the lowest priority, so that it delays no step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.timeline.report.terminal import changed

_PATIENCE_S = 120.0
_REST = 50
"""Pause after a look, in times its duration: with many ranks it takes long."""


@dataclass
class VerdictWatch:
    """A watcher that looks every `every_s` seconds, in a thread, until closed; on rank 0.

    Attributes:
        run: the folder.
        say: shows a line. event: records one; any thread calls both.
    """

    run: Path
    every_s: float
    say: Callable[[str], None]
    event: Callable[[dict[str, Any]], None]
    _step: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="verdicts", daemon=True)
        self._thread.start()

    def begin_step(self, step: int) -> None:
        """Note that step `step` begins."""
        self._step = step

    def close(self) -> None:
        """Stop. A look that is under way ends by itself."""
        self._ended.set()

    def _watch(self) -> None:
        before: dict[str, str] = {}
        after_s = self.every_s
        while not self._ended.wait(after_s):
            began = time.monotonic()
            found = self._look()
            after_s = max(self.every_s, _REST * (time.monotonic() - began))
            if found is None or self._ended.is_set():
                continue
            for text in changed(before, found):
                self.say(text)
                self.event({"event": "verdict", "at_step": self._step, "text": text})
            before = found

    def _look(self) -> dict[str, str] | None:
        """Return the verdicts; None if they are unknown."""
        argv = ["nice", "-n", "19", sys.executable, "-m", "hvdtrain", "timeline", "watch", str(self.run)]
        with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError):
            done = subprocess.run(
                [*argv, "--once", "--json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PATIENCE_S,
                check=True,
            )
            found = json.loads(done.stdout)["verdicts"]
            return {str(key): str(text) for key, text in found.items()}
        return None
