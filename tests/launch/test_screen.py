"""What a job shows, where it is taken at once, late, or never in time."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from hvdtrain.cli.launch import _show
from hvdtrain.launch.job_output import MOST_CHARACTERS, SAID, Screen


class Terminal:
    """Takes lines when it is `open`; `seen` are those that it took."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.seen: list[tuple[str, bool]] = []
        self.screen = Screen(self._take)

    def _take(self, text: str, err: bool) -> None:
        self.open.wait()
        self.seen.append((text, err))


def test_lines_are_shown_in_their_order() -> None:
    terminal = Terminal()
    terminal.open.set()
    terminal.screen.show("out", err=False)
    terminal.screen.say("driver")
    terminal.screen.show("err", err=True)
    terminal.screen.close()
    assert terminal.seen == [("out", False), (f"{SAID}driver", True), ("err", True)]


@pytest.mark.parametrize("more", [0, 3])
def test_an_unread_output_does_not_block_ranks_and_uses_little_memory(more: int) -> None:
    terminal = Terminal()
    line = "x" * (1 << 16)
    room = MOST_CHARACTERS // len(line)
    for _ in range(room + more):
        terminal.screen.show(line, err=False)
    terminal.open.set()
    terminal.screen.close()
    said = [text for text, err in terminal.seen if err]
    assert len(terminal.seen) - len(said) == room
    expected = f"{SAID}{more} lines were dropped around here: they arrived faster than they could be shown"
    assert said == ([expected] if more else [])


def test_characters_that_a_terminal_cannot_show_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    _show("loss → 1\udce9", err=False)
    assert stream.buffer.getvalue() == b"loss \\u2192 1\\udce9\n"  # type: ignore[attr-defined]
