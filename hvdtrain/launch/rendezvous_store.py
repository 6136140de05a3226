"""What ranks tell each other while Horovod starts: the addresses of a round, as each host keeps them. No I/O.

Each rank of Gloo puts a value of 136 bytes for each other rank, and reads the values of all others twice. So every host
gets each value once, packed, and hands it to its own ranks as often as they ask.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping

FOUND, ABSENT, GONE = 200, 404, 410

MOST_BYTES = 1 << 21
"""Of a value: 136 bytes a rank, for 15,000 ranks."""

MOST_KEYS = 1 << 18
"""Of a round: six for each rank, and as many for each process set."""

_MESSAGE_BYTES = 1 << 20
"""Of values in a message; with one more value it still is a line that `lines` reads."""

Reply = Callable[[int, bytes], None]
"""Called once, with a status of HTTP and the value."""


class RoundStore:
    """The keys of the newest round; those of others are dropped, so that a rank that is late learns it at once."""

    def __init__(self) -> None:
        self._round = 0
        self._keys: dict[str, bytes] = {}
        self._asking: dict[str, list[Reply]] = {}

    def open(self, number: int, keys: Mapping[str, bytes]) -> None:
        """Begin a round with `keys`; who still asks for the one before is refused. Number 0: there is no round."""
        asking, self._asking = self._asking, {}
        self._round, self._keys = number, dict(keys)
        for reply in (reply for replies in asking.values() for reply in replies):
            reply(GONE, b"")

    def put(self, number: int, key: str, value: bytes) -> bool:
        """Keep a value, and answer who waits for it; whether it was kept."""
        if not number or number != self._round or len(self._keys) >= MOST_KEYS:
            return False
        self._keys[key] = value
        for reply in self._asking.pop(key, ()):
            reply(FOUND, value)
        return True

    def get(self, number: int, key: str, reply: Reply) -> bool:
        """Reply now, or when the key is put; whether it was now."""
        if not number or number != self._round:
            reply(GONE, b"")
        elif key in self._keys:
            reply(FOUND, self._keys[key])
        else:
            self._asking.setdefault(key, []).append(reply)
            return False
        return True

    def forget(self, key: str, reply: Reply) -> None:
        """Take back a request that waits."""
        replies = self._asking.get(key, [])
        if reply in replies:
            replies.remove(reply)
            if not replies:
                del self._asking[key]


class Relay:
    """Between the stores of all hosts, in the driver: what a rank of one has put goes to all, packed as it came.

    Args:
        send: called with the type and the facts of a message for every host.
    """

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._round = 0
        self._put: dict[str, str] = {}
        self._put_bytes = 0

    def open(self, number: int, keys: Mapping[str, str]) -> None:
        """Begin a round with `keys`, in text."""
        self._round, self._put, self._put_bytes = number, {}, 0
        self._send("open", round=number, keys=dict(keys))

    def close(self, number: int) -> None:
        """End a round, if it is the newest: who still asks for its keys is refused."""
        if number == self._round:
            self.open(0, {})

    def put(self, number: int, key: str, value: str) -> None:
        """Take a value. It waits for `flush`: as a thousand ranks put at once, many go in a message."""
        if number != self._round:
            return
        self._put[key] = value
        self._put_bytes += len(value)
        if self._put_bytes >= _MESSAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if self._put:
            self._send("keys", round=self._round, keys=self._put)
        self._put, self._put_bytes = {}, 0


def packed(value: bytes) -> str:
    """A value as it goes to other hosts. The addresses of a rank are alike but for a number: they take a tenth."""
    return b64encode(zlib.compress(value, 1)).decode()


def unpacked(text: str) -> bytes:
    """The value again, cut off where it is longer than any may be."""
    return zlib.decompressobj().decompress(b64decode(text), MOST_BYTES)
