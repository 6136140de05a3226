"""Progress on the screen: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from hvdtrain.observe.output import unfailing

if TYPE_CHECKING:
    from rich.live import Live

_WINDOW = 20
"""Steps in the mean of the shown speed. The first step warms up and may compile, so the second one replaces it."""

_LIVE_EVERY_S = 0.1


class Progress:
    """Shows finished steps on rank 0. Other ranks show nothing.

    Args:
        unit: what a step's `tokens` counts.
        live: whether a line on a terminal may be overwritten. Not under a launcher: Open MPI's mpirun gives rank 0 a
            terminal of its own, even if its output goes to a file.
    """

    def __init__(
        self, unit: str, line_every_s: float, *, live: bool, out: TextIO | None = None, quiet: bool = False
    ) -> None:
        self._total = 0
        self._unit = unit
        self._every_s = line_every_s
        self._out = unfailing(out or sys.stdout)
        self._rewrite = live and self._out.isatty()
        self._quiet = quiet
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._last_line = -float("inf")
        self._live: Live | None = None

    def begin(self, total: int) -> None:
        """Prepare for steps up to step `total`."""
        self._total = total

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a step from its record in the journal."""
        if self._quiet:
            return
        self._steps += 1
        if self._steps == 2:
            self._recent.clear()
        self._recent.append((record["step_s"], record["tokens"]))
        every_s = _LIVE_EVERY_S if self._rewrite else self._every_s
        if time.monotonic() - self._last_line >= every_s or record["step"] == self._total:
            self._last_line = time.monotonic()
            (self._update if self._rewrite else self._print)(self._line(record))

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def close(self) -> None:
        """End the live line. Later output follows below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, record: Mapping[str, Any]) -> str:
        seconds = sum(s for s, _ in self._recent)
        speed = sum(t for _, t in self._recent) / seconds if seconds else 0.0
        eta = duration((self._total - record["step"]) * seconds / len(self._recent))
        return (
            f"step {record['step']:>{len(str(self._total))}}/{self._total}  loss {record['loss']:.4f}  "
            f"{speed:,.0f} {self._unit}/s  ETA {eta}"
        )

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _update(self, line: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=Console(file=self._out), auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


def duration(seconds: float) -> str:
    """Format seconds: ``75`` as ``1:15``, ``3675`` as ``1:01:15``."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Format labels and values in two columns."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)
