"""The driver's connections to agents: their processes, the messages in both directions, and values of all hosts."""

from __future__ import annotations

import subprocess
import threading
import zlib
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
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
    """Relays values between the stores of all hosts, in the driver, packed as received.

    Each rank of Gloo puts 136 bytes for each other rank, and reads the values of all others twice. So each host
    receives once what its ranks use of a value (see `Readers`), and serves them from its copy. `send` is called with
    type and facts of a message for every host, `send_to` with a host before these.
    """

    def __init__(self, send: Callable[..., None], send_to: Callable[..., None]) -> None:
        self._send, self._send_to = send, send_to
        self._round = 0
        self._put: dict[str, dict[str, str]] = {}  # by host
        self._put_bytes: Counter[str] = Counter()

    def open(self, number: int, keys: Mapping[str, str]) -> None:
        """Begin a round with `keys`, as text. Number 0: no round; requests are refused."""
        self._round, self._put, self._put_bytes = number, {}, Counter()
        self._send("open", round=number, keys=dict(keys))

    def put(self, number: int, key: str, value: Mapping[str, str]) -> None:
        """Queue what each host gets of a value until `flush`: a thousand ranks put at once. All hosts are ""."""
        for host, text in value.items() if number == self._round else ():
            self._put.setdefault(host, {})[key] = text
            self._put_bytes[host] += len(text)
            if self._put_bytes[host] >= _MESSAGE_BYTES:
                self._flush(host)

    def flush(self) -> None:
        """Send the queued values."""
        for host in list(self._put):
            self._flush(host)

    def _flush(self, host: str) -> None:
        send = partial(self._send_to, host) if host else self._send
        send("keys", round=self._round, keys=self._put.pop(host))
        del self._put_bytes[host]


class Readers:
    """The ranks of a round by host, and which part of a value each host needs.

    For each communicator, a rank of Gloo puts one value with as many bytes for each other rank, and reads of the values
    of others only the bytes for itself (gloo/rendezvous/context.cc). `keys`: those of a round, as `Relay.open` gets
    them, with rank, size, and those within the host and between hosts.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._ranks: dict[str, dict[str, list[int]]] = {}  # by the scope of a communicator and the host
        for key, value in keys.items():
            scope, _, place = key.partition("/")
            if scope == "rank_and_size":
                rank, _, local_rank, _, cross_rank, _ = map(int, value.split(","))
                for scope, number in (("global", rank), (f"cross_{local_rank}", cross_rank)):
                    self._ranks.setdefault(scope, {}).setdefault(place.rpartition(":")[0], []).append(number)

    def divide(self, key: str, value: bytes) -> dict[str, str]:
        """Return what each host gets of a value, packed; "" is for all of them."""
        scope, _, own = key.partition("/")
        by_host = self._ranks.get(scope, {})
        others = sum(map(len, by_host.values())) - 1
        if not own.isdigit() or others < 1 or not value or len(value) % others:
            return {"": packed(value)}
        width, found = len(value) // others, {}
        for host, ranks in by_host.items():
            if slots := [rank - (rank > int(own)) for rank in ranks if rank != int(own)]:
                part = b"".join(value[slot * width : (slot + 1) * width] for slot in slots)
                found[host] = f"{len(value)}:{width}:{','.join(map(str, slots))}:{packed(part)}"
        return found


def packed(value: bytes) -> str:
    """Return a value as it travels between hosts, compressed to a tenth: a rank's addresses differ by a number."""
    return b64encode(zlib.compress(value, 1)).decode()


def unpacked(text: str) -> bytes:
    """Return the original value, truncated to the largest allowed; of a divided one, zeros where other hosts read."""
    *place, content = text.split(":")
    value = zlib.decompressobj().decompress(b64decode(content), MOST_BYTES)
    if not place:
        return value
    size, width = (min(int(number), MOST_BYTES) for number in place[:2])
    whole = bytearray(size)
    for index, slot in enumerate(map(int, place[2].split(","))):
        whole[slot * width : (slot + 1) * width] = value[index * width : (index + 1) * width]
    return bytes(whole)
