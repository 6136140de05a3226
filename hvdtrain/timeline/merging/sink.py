"""The file of a merged trace."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import orjson

from hvdtrain.files import replacing

Event = Mapping[str, Any]

_TOGETHER = 4096
_LEVEL = 5
"""Of gzip: half the time of the default level, 5% more bytes."""


def write_trace(path: Path, events: Iterator[Event], facts: Mapping[str, Any]) -> int:
    """Write events in Google's Trace Event Format, JSON object form, with `facts` as its other data.

    It is gzip if its name ends in .gz. Returns the number of events.

    Errors:
        OSError: it cannot be written; `path` is unchanged.
    """
    count = 0
    with replacing(path) as temporary, ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(temporary.open("wb"))
        if path.suffix == ".gz":
            file = cast(IO[bytes], stack.enter_context(gzip.GzipFile(path.stem, "wb", _LEVEL, file, mtime=0)))
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        while lines := [orjson.dumps(event) for event in islice(events, _TOGETHER)]:
            file.write((b",\n" if count else b"") + b",\n".join(lines))
            count += len(lines)
        file.write(b'\n],"otherData":' + orjson.dumps(facts) + b"}\n")
    return count
