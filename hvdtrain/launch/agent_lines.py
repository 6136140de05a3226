"""JSON lines between the driver and an agent, over the agent's stdin and stdout."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

from hvdtrain.runtime.channel import parse

MOST_BYTES = 1 << 22
"""Of a line."""


def line(kind: str, facts: Mapping[str, Any]) -> bytes:
    """A message as it is written."""
    return json.dumps({"type": kind, **facts}).encode() + b"\n"


class LineWriter:
    """Writes messages from any thread; each is whole. Where nobody reads any more, they are lost."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, kind: str, **facts: Any) -> None:
        """Write a message."""
        self.write(line(kind, facts))

    def write(self, data: bytes) -> None:
        """Write whole lines."""
        with self._lock:
            try:
                self._stream.write(data)
                self._stream.flush()
            except (OSError, ValueError):
                return


def messages(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """What comes until the stream ends, or a line has no end; what is no message is passed over."""
    while True:
        read = stream.readline(MOST_BYTES)
        if not read.endswith(b"\n"):
            return
        message = parse(read)
        if message is not None:
            yield message
