"""Output that cannot be written or encoded raises nothing."""

from __future__ import annotations

import io
from contextlib import suppress

from hvdtrain.observe.output import unfailing
from hvdtrain.observe.progress import Progress


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


def test_all_else_is_the_streams_own_and_nothing_is_wrapped_twice() -> None:
    stream = io.StringIO()
    out = unfailing(stream)
    assert unfailing(out) is out and not out.isatty()
    out.write("kept")
    assert stream.getvalue() == "kept"
