"""Progress: plain lines by time, the last step always, one live line on a terminal; no output raises anything."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from contextlib import suppress

from hvdtrain.observe.output import Progress, unfailing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.5, "tokens": 200.0, "step_s": 0.5}


def _show(out: io.StringIO, *, live: bool = True, quiet: bool = False) -> str:
    progress = Progress("tokens", 1000.0, live=live, out=out, quiet=quiet)
    progress.begin(10)
    progress.say("hello")
    for step in range(1, 11):
        progress.step(_record(step))
    progress.close()
    return out.getvalue()


def test_the_first_step_is_no_measure_of_the_others() -> None:
    out = io.StringIO()
    progress = Progress("tokens", 0.0, live=False, out=out)
    progress.begin(3)
    for step, seconds in enumerate((100.0, 0.5, 0.5), 1):
        progress.step({**_record(step), "step_s": seconds})
    shown = [line.split("  ")[2] for line in out.getvalue().splitlines()]
    assert shown == ["2 tokens/s", "400 tokens/s", "400 tokens/s"]


def test_a_terminal_gets_a_live_line_but_not_under_a_launcher_and_other_ranks_are_quiet() -> None:
    shown = _show(Terminal())
    assert "\x1b[" in shown and "step 10/10" in shown
    plain = _show(Terminal(), live=False)
    assert "\x1b[" not in plain and "step 10/10" in plain and plain.count("step ") == 2, "the first and the last"
    assert _show(Terminal(), quiet=True) == ""


def test_what_cannot_be_written_is_lost() -> None:
    closed = io.StringIO()
    closed.close()
    full = open("/dev/full", "w", buffering=1)  # noqa: PTH123, SIM115  (closing it would fail)
    for stream in (closed, full):
        out = unfailing(stream)
        assert out.write("x" * 100_000 + "\n") == 100_001
        out.flush()
        Progress("samples", 0.0, live=False, out=stream).say("a line")
    with suppress(OSError):
        full.close()


def test_what_cannot_be_encoded_is_escaped() -> None:
    raw = io.BytesIO()
    out = unfailing(io.TextIOWrapper(raw, encoding="ascii"))
    print("läufe \udcff", file=out, flush=True)
    assert raw.getvalue() == b"l\\xe4ufe \\udcff\n"
    assert unfailing(out) is out and not out.isatty(), "all else is the stream's own"


def test_a_line_is_one_write_also_where_python_does_not_buffer() -> None:
    """mpirun puts its tag between two writes. Each message of this socket is a write."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = """
import sys
from hvdtrain.observe.output import make_output_unfailing
make_output_unfailing()
print("one")
print("two", "words", file=sys.stderr)
print("no end", end="", flush=True)
"""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    subprocess.run(
        [sys.executable, "-c", program], stdout=theirs.fileno(), stderr=theirs.fileno(), env=environment, check=True
    )
    theirs.close()
    found = []
    while part := ours.recv(4096):
        found.append(part)
    ours.close()
    assert sorted(found) == [b"no end", b"one\n", b"two words\n"]
