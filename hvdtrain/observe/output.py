"""Output: text and streams that raise no errors, and progress on the screen, one live line on a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast

_LARGEST = 1 << 63


def encodable(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """Return the value in types of JSON. A value of any other type becomes its ``repr``."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return int(value) if -_LARGEST <= value < _LARGEST else str(value)
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, Mapping):
        return {encodable(str(name)): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    try:
        return encodable(repr(value))
    except Exception:  # the user's own __repr__ may raise
        return f"({type(value).__name__})"


class Unfailing:
    """Wraps a text stream so that `write` and `flush` raise no errors.

    The disk may be full, a pipe closed, or the terminal's encoding may lack characters. Each line, with its end, is one
    write to the system: with PYTHONUNBUFFERED Python writes the end apart, and mpirun puts its tag between the two.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        with suppress(Exception):  # the user's own stream may lack it
            stream.reconfigure(errors="backslashreplace")  # type: ignore[attr-defined]
            if stream.write_through:  # type: ignore[attr-defined]
                stream.reconfigure(write_through=False, line_buffering=True)  # type: ignore[attr-defined]

    def write(self, text: str) -> int:
        """Write the text if possible."""
        with suppress(OSError, ValueError):  # a closed file or an encoding raises the latter
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream."""
        return getattr(self._stream, name)


def unfailing(stream: TextIO) -> TextIO:
    """Return `stream` in a wrapper that raises no errors."""
    return cast("TextIO", stream if isinstance(stream, Unfailing) else Unfailing(stream))


def make_output_unfailing() -> None:
    """Make errors of this process's standard output and error harmless.

    Closed ones are opened on /dev/null. Otherwise the next opened file would get their numbers, and with them the
    output of libraries.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(1 if name == "stdout" else 2, "w", encoding="utf-8", closefd=False))
        setattr(sys, name, unfailing(getattr(sys, name)))


def to_stderr(text: str) -> None:
    """Write a text by one system call: a stuck thread may hold the locks of Python's own buffers."""
    with suppress(OSError):
        os.write(2, text.encode(errors="replace"))


@dataclass
class FailureOutput:
    """Where the card of a raised error is shown.

    The command line prints it last; the Python API does not, because Python prints the error.
    """

    show: Callable[[str], None] = lambda text: None  # shows the card
    reported: bool = False  # whether this rank or another one has reported the error: then the caller prints nothing


_WINDOW = 20
"""Steps in the mean of the shown speed. The first step warms up and may compile, so the second one replaces it."""

_LIVE_EVERY_S = 0.1


class Progress:
    """Shows finished steps on rank 0. Other ranks show nothing. `unit` is what a step's `tokens` counts.

    A `live` line on a terminal is overwritten. Not under a launcher: Open MPI's mpirun gives rank 0 a terminal of its
    own, even if its output goes to a file.
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
        self._live: Any = None  # of rich

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
