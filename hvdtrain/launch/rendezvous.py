"""The HTTP store for Horovod's C++ rendezvous: on one address, behind a token; it never interprets the values.

Horovod requests ``http://ADDR:PORT/SCOPE/KEY``. With ``ADDR`` = ``127.0.0.1:4711/TOKEN/ROUND`` and ``PORT`` = 0 the
path is ``/TOKEN/ROUND:0/SCOPE/KEY``: each request carries the token, and each round has its own store.

Anybody can connect. A connection that has not shown the token is a stranger. Strangers have few places and a few
seconds, however slowly they send, and a new one replaces the oldest. So there is always a place for a rank.

Not `http.server`: it uses a thread per connection, and a client that sends slowly occupies it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

FOUND, ABSENT, GONE = 200, 404, 410

MOST_BYTES = 1 << 21
"""Largest value: 136 bytes per rank, for 15,000 ranks."""

MOST_KEYS = 1 << 18
"""Most keys of a round: six per rank, and as many per process set."""

Put = Callable[[int, str, bytes], None]

Value = bytes | Callable[[], bytes]
"""A value, or what returns it for each request: those of a thousand ranks take memory only for as long."""

MOST_STRANGERS = 128
STRANGER_S = 5.0
"""Time from the connection to the end of the request's head, without the token."""

_POLL_S = 4.0  # a request for a missing key is answered after this time; Horovod asks again
_REQUEST_S = 30.0  # time for a rank to send or read a value
_TICK_S = 0.25
_ACCEPTED_AT_ONCE = 32
"""Less than the places of strangers, so that a rank's request is read before the connection could be replaced."""
_LOGGED = 20  # refused requests that are all logged; afterwards each power of two

_MOST_HEAD_BYTES = 1 << 14
_HEAD = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,2048}) HTTP/1\.[01]\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,9})[ \t]*\r\n", re.IGNORECASE)
_PATH = re.compile(rb"/([A-Za-z0-9_-]{1,128})/([0-9]{1,9}):0/([A-Za-z0-9._@:-]{1,400}/[A-Za-z0-9._@:-]{1,400})")


class RoundStore:
    """The keys of the newest round. Requests for other rounds fail, so that a late rank learns of it at once."""

    def __init__(self) -> None:
        self._round = 0
        self._keys: dict[str, Value] = {}
        self._wanted: dict[str, asyncio.Event] = {}

    def open(self, number: int, keys: Mapping[str, Value]) -> None:
        """Begin a round with `keys`; refuse waiting requests of the round before. Number 0: no round."""
        wanted, self._wanted = self._wanted, {}
        self._round, self._keys = number, dict(keys)
        for event in wanted.values():
            event.set()

    def put(self, number: int, key: str, value: Value) -> bool:
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
        found = self._keys.get(key)
        return (ABSENT, b"") if found is None else (FOUND, found if isinstance(found, bytes) else found())


class Rendezvous:
    """The server of one host: one thread that never waits for a client.

    `log` is called with a line per refused request; `put` with round, key and value of each PUT, besides storing it.
    """

    def __init__(self, log: Callable[[str], object], put: Put | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self._log, self._put = log, put
        self._store = RoundStore()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: log(f"rendezvous: {context.get('exception', context)!r}"))
        self._until_s: dict[asyncio.Task[None], float] = {}  # the deadlines of all connections
        self._strangers: dict[asyncio.Task[None], str] = {}  # their addresses, "" once refused
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)

    @property
    def address(self) -> str:
        """Host, port and token. Ranks get it with the number of a round appended."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}/{self.token}"

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def open(self, number: int, keys: Mapping[str, bytes]) -> None:
        """Begin a round with `keys`; drop those of the round before. Number 0: no round."""
        self._loop.call_soon_threadsafe(self._store.open, number, keys)

    def add(self, number: int, keys: Mapping[str, Value]) -> None:
        """Store values from ranks of other hosts."""
        self._loop.call_soon_threadsafe(lambda: [self._store.put(number, key, value) for key, value in keys.items()])

    def _serve(self) -> None:
        self._listen()
        self._tick()
        self._loop.run_forever()

    def _tick(self) -> None:
        for task in [task for task, until_s in self._until_s.items() if self._loop.time() >= until_s]:
            if sender := self._strangers.get(task):
                self.log_limited("late", f"closed a connection from {sender} without a request in {STRANGER_S:.0f} s")
            task.cancel()
        self._loop.call_later(_TICK_S, self._tick)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                peer, sender = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # most often too many open files
                self._log_crowd(f"no connection can be accepted: {error.strerror}")
                if self._strangers:
                    return self._close_oldest()
                self._loop.remove_reader(self._listener)  # for a tick: it would be called again at once
                self._loop.call_later(_TICK_S, self._listen)
                return
            peer.setblocking(False)
            task = self._loop.create_task(self._serve_client(peer))
            self._strangers[task] = sender[0]
            self._until_s[task] = self._loop.time() + STRANGER_S
            if len(self._strangers) > MOST_STRANGERS:
                self._close_oldest()
                self._log_crowd(f"more than {MOST_STRANGERS} connections have sent no request")

    def _close_oldest(self) -> None:
        task = next(iter(self._strangers))
        del self._strangers[task]
        task.cancel()

    def _log_crowd(self, text: str) -> None:
        see = f"see: ss -tnpe dport = :{self._listener.getsockname()[1]}"
        self.log_limited("crowd", f"{text}; the oldest are closed to make room for ranks. Who holds them? {see}")

    async def _serve_client(self, peer: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        with peer, suppress(OSError):
            try:
                await self._answer(task, peer)
            finally:
                del self._until_s[task]
                self._strangers.pop(task, None)

    async def _answer(self, task: asyncio.Task[None], peer: socket.socket) -> None:
        """Read the one request of a connection, and answer it."""
        data, sender = b"", self._strangers[task]
        while b"\r\n\r\n" not in data:
            if len(data) > _MOST_HEAD_BYTES:
                return await self._refuse(task, peer, "request", 431)
            if not (more := await self._loop.sock_recv(peer, 1 << 16)):
                return
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        found = _HEAD.match(head + b"\r\n")
        if found is None:
            return self.log_limited("refused", f"refused an invalid request from {sender}")
        method, part = found[1].decode(), _PATH.fullmatch(found[2])
        if method not in ("GET", "PUT", "DELETE"):
            return await self._refuse(task, peer, method, 501)
        if part is None:
            return await self._refuse(task, peer, method, 404)
        if not hmac.compare_digest(part[1], self.token.encode()):
            return await self._refuse(task, peer, method, 403)
        self._strangers.pop(task, None)
        self._until_s[task] = self._loop.time() + _REQUEST_S
        number, key = int(part[2]), part[3].decode()
        status, value = FOUND, b""
        if method == "GET":
            status, value = await self._store.get(number, key, _POLL_S)
        elif method == "PUT":
            length = _LENGTH.search(head + b"\r\n")
            if length is None or int(length[1]) > MOST_BYTES:
                return await self._refuse(task, peer, method, 413)
            while len(body) < int(length[1]):
                if not (more := await self._loop.sock_recv(peer, 1 << 16)):
                    return
                body += more
            body = body[: int(length[1])]
            if self._store.put(number, key, body) and self._put is not None:
                self._put(number, key, body)
        self._until_s[task] = self._loop.time() + _REQUEST_S
        await self._send(peer, status, value)

    async def _refuse(self, task: asyncio.Task[None], peer: socket.socket, method: str, status: int) -> None:
        """Refuse the request and log it, without the path, which may contain the token."""
        sender, _ = peer.getpeername()
        self.log_limited("refused", f"refused a {method} from {sender} with {status}")
        if task in self._strangers:
            self._strangers[task] = ""
        await self._send(peer, status, b"")
        peer.shutdown(socket.SHUT_WR)
        while await self._loop.sock_recv(peer, 1 << 16):  # closing with unread data would reset the connection
            pass

    async def _send(self, peer: socket.socket, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} \r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await self._loop.sock_sendall(peer, head.encode() + body)

    def log_limited(self, kind: str, text: str) -> None:
        """Log a line; the more lines of a kind, the rarer."""
        self._counts[kind] += 1
        number = self._counts[kind]
        few = number <= (_LOGGED if kind == "refused" else 1)
        if few or (number > _LOGGED and number & (number - 1) == 0):
            self._log(f"rendezvous: {text}{'' if few else f', the {number}th'}")
