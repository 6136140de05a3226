"""The values that ranks exchange while Horovod starts: the addresses of a round, stored on each host. No I/O.

Each rank of Gloo puts 136 bytes for each other rank, and reads the values of all others twice. So each host receives
each value once, packed, and serves its own ranks from its copy.
"""

from __future__ import annotations

import asyncio
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress

FOUND, ABSENT, GONE = 200, 404, 410

MOST_BYTES = 1 << 21
"""Largest value: 136 bytes per rank, for 15,000 ranks."""

MOST_KEYS = 1 << 18
"""Most keys of a round: six per rank, and as many per process set."""

_MESSAGE_BYTES = 1 << 20
"""Values per message; with one more value the line is still within `json_lines.MOST_BYTES`."""


class RoundStore:
    """The keys of the newest round. Requests for other rounds fail, so that a late rank learns of it at once."""

    def __init__(self) -> None:
        self._round = 0
        self._keys: dict[str, bytes] = {}
        self._wanted: dict[str, asyncio.Event] = {}

    def open(self, number: int, keys: Mapping[str, bytes]) -> None:
        """Begin a round with `keys`; refuse waiting requests of the round before. Number 0: no round."""
        wanted, self._wanted = self._wanted, {}
        self._round, self._keys = number, dict(keys)
        for event in wanted.values():
            event.set()

    def put(self, number: int, key: str, value: bytes) -> bool:
        """Store a value and answer the requests that wait for it; return whether it was stored."""
        if not number or number != self._round or len(self._keys) >= MOST_KEYS:
            return False
        self._keys[key] = value
        if event := self._wanted.pop(key, None):
            event.set()
        return True

    async def get(self, number: int, key: str, wait_s: float) -> tuple[int, bytes]:
        """Return HTTP status and value of a key; wait up to `wait_s` until it is put."""
        if number == self._round > 0 and key not in self._keys:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted.setdefault(key, asyncio.Event()).wait(), wait_s)
        if not number or number != self._round:
            return GONE, b""
        return (FOUND, self._keys[key]) if key in self._keys else (ABSENT, b"")


class Relay:
    """Relays values between the stores of all hosts, in the driver: each value goes to all hosts, packed as received.

    `send` is called with type and facts of a message for every host.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._round = 0
        self._put: dict[str, str] = {}
        self._put_bytes = 0

    def open(self, number: int, keys: Mapping[str, str]) -> None:
        """Begin a round with `keys`, as text. Number 0: no round; requests are refused."""
        self._round, self._put, self._put_bytes = number, {}, 0
        self._send("open", round=number, keys=dict(keys))

    def put(self, number: int, key: str, value: str) -> None:
        """Queue a value until `flush`: many values share a message, as a thousand ranks put at once."""
        if number != self._round:
            return
        self._put[key] = value
        self._put_bytes += len(value)
        if self._put_bytes >= _MESSAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the queued values."""
        if self._put:
            self._send("keys", round=self._round, keys=self._put)
        self._put, self._put_bytes = {}, 0


def packed(value: bytes) -> str:
    """Return a value as it travels between hosts, compressed to a tenth: a rank's addresses differ by a number."""
    return b64encode(zlib.compress(value, 1)).decode()


def unpacked(text: str) -> bytes:
    """Return the original value, truncated to the largest allowed."""
    return zlib.decompressobj().decompress(b64decode(text), MOST_BYTES)
