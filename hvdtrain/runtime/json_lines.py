"""Send and read messages as JSON lines over a socket or a pipe. A message is an object with a "type"."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import IO, Any

MOST_BYTES = 1 << 22
"""Longest line that is read."""


def encode_message(kind: str, facts: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps({"type": kind, **facts}).encode() + b"\n"


class MessageWriter:
    """Writes whole messages, from any thread. When nobody reads them any more, they are lost."""

    def __init__(self, end: IO[bytes] | socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, kind: str, **facts: Any) -> bool:
        """Write a message; False where nobody reads any more."""
        return self.write(encode_message(kind, facts))

    def write(self, data: bytes) -> bool:
        """Write whole lines; False where nobody reads any more."""
        try:
            with self._lock:
                if isinstance(self._end, socket.socket):
                    self._end.sendall(data)
                else:
                    self._end.write(data)
                    self._end.flush()
        except (OSError, ValueError):
            return False
        return True


def read_messages(end: IO[bytes] | socket.socket, most_bytes: int = MOST_BYTES) -> Iterator[dict[str, Any]]:
    """Yield messages until the other end is closed, or a line is longer than `most_bytes`. Skip other lines."""
    for line in _socket_lines(end, most_bytes) if isinstance(end, socket.socket) else _stream_lines(end, most_bytes):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and isinstance(message.get("type"), str):
            yield message


def _stream_lines(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    while (line := stream.readline(most_bytes)).endswith(b"\n"):
        yield line


def _socket_lines(end: socket.socket, most_bytes: int) -> Iterator[bytes]:
    rest = b""  # not by makefile: a socket that is closed while its file is read stays open
    while len(rest) <= most_bytes:
        try:
            data = end.recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
