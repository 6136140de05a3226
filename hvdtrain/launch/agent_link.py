"""The driver's connections to agents: their processes, the messages in both directions, and values of all hosts."""

from __future__ import annotations

import subprocess
import threading
import zlib
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from hvdtrain.launch.rendezvous import MOST_BYTES
from hvdtrain.runtime.channel import MessageWriter, encode_message, read_messages

END_S = 12.0
"""How long an agent may take to end its workers and itself after its pipe is closed."""

_READ_S = 1.0  # how long to wait for the last messages of an agent that has ended

_MESSAGE_BYTES = 1 << 20  # values per message; with one more value the line is still within `channel.MOST_BYTES`

Inbox = Callable[[tuple["AgentLink", dict[str, Any]]], None]


class AgentLink:
    """A started agent.

    `inbox` gets `(link, message)` for each message, and `(link, {"type": "gone", "why"})` when the agent has ended.
    """

    def __init__(self, host: str, argv: Sequence[str], environment: Mapping[str, str], inbox: Inbox) -> None:
        self.host = host
        self.store = ""
        self.address = ""
        self.interface = ""
        self.networks: dict[str, str] = {}  # its interfaces by their network
        self._inbox = inbox
        self._process = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the driver alone
        )
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._errors: deque[str] = deque(maxlen=8)
        self._threads = [threading.Thread(target=w, daemon=True) for w in (self._write, self._read, self._read_errors)]

    def start(self) -> None:
        """Start to read and write."""
        for thread in reversed(self._threads):  # the message reader waits for the reader of stderr, the last one
            thread.start()

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message, without waiting."""
        self.write(encode_message(kind, facts))

    def write(self, data: bytes) -> None:
        """Send whole lines, without waiting."""
        self._outbox.put(data)

    def close(self) -> None:
        """Close the agent's stdin; it then ends its workers and itself."""
        self._outbox.put(None)

    def kill(self) -> None:
        """Kill it at once; its workers end because their channels close."""
        self._process.kill()

    def wait(self, timeout_s: float = END_S) -> None:
        """Wait until it has ended and all its messages are read; kill it after the timeout."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(max(timeout_s, _READ_S))

    def ended(self) -> bool:
        """Check whether it has ended and all its messages are read."""
        return self._process.poll() is not None and not any(thread.is_alive() for thread in self._threads)

    def _write(self) -> None:
        assert self._process.stdin is not None
        writer = MessageWriter(self._process.stdin)
        while (data := self._outbox.get()) is not None:
            writer.write(data)
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # ssh never ends when its other end hangs
            self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for message in read_messages(stream):
                self._inbox((self, message))
        self._outbox.put(None)
        self._threads[2].join(1.0)
        said = "; ".join(self._errors)
        self._inbox((self, {"type": "gone", "why": said or "its agent has ended"}))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            self._errors.extend(text for line in stream if (text := line.decode("utf-8", "replace").strip()))


class Relay:
    """Relays values between the stores of all hosts, in the driver: each value goes to all hosts, packed as received.

    Each rank of Gloo puts 136 bytes for each other rank, and reads the values of all others twice. So each host
    receives each value once, packed, and serves its own ranks from its copy. `send` is called with type and facts of a
    message for every host.
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
