"""The HTTP store for Horovod's C++ rendezvous: on one address, behind a token; it never interprets the values.

Horovod requests ``http://ADDR:PORT/SCOPE/KEY``. With ``ADDR`` = ``127.0.0.1:4711/TOKEN/ROUND`` and ``PORT`` = 0 the
path is ``/TOKEN/ROUND:0/SCOPE/KEY``: each request carries the token, and each round has its own store.

Anybody can connect. A connection that has not shown the token is a stranger. Strangers have few places and a few
seconds, however slowly they send, and a new one replaces the oldest. So there is always a place for a rank.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from hvdtrain.launch.rendezvous_store import RoundStore
from hvdtrain.launch.request import Request

Put = Callable[[int, str, bytes], None]

MOST_STRANGERS = 128
_TICK_S = 0.25
_ACCEPTED_AT_ONCE = 32
"""Less than the places of strangers, so that a rank's request is read before the connection could be replaced."""
_LOGGED = 20
"""Refused requests that are all logged; afterwards each power of two."""


class Rendezvous:
    """The server of one host: one thread that never waits for a client.

    Args:
        log: called with a line per refused request.
        host: the IPv4 address of this host to listen on.
        put: called with round, key and value of each PUT, in addition to storing it.
    """

    def __init__(self, log: Callable[[str], object], host: str = "127.0.0.1", put: Put | None = None) -> None:
        self.token = secrets.token_urlsafe(32)
        self._log, self._put = log, put
        self._store = RoundStore()
        self._listener = socket.create_server((host, 0), backlog=4096)
        self._listener.setblocking(False)
        self._woken, self._wake = socket.socketpair()
        self._todo: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._do)
        self._listening = False
        self._open: dict[Request, None] = {}
        self._strangers: dict[Request, None] = {}
        self._counts: Counter[str] = Counter()
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)

    @property
    def address(self) -> str:
        """Host, port and token. Ranks get it with the number of a round appended."""
        host, port = self._listener.getsockname()
        return f"{host}:{port}/{self.token}"

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._run_in_thread(None)
        self._thread.join()

    def open(self, number: int, keys: Mapping[str, bytes]) -> None:
        """Begin a round with `keys`; drop those of the round before. Number 0: no round."""
        self._run_in_thread(lambda: self._store.open(number, keys))

    def add(self, number: int, keys: Mapping[str, bytes]) -> None:
        """Store values from ranks of other hosts."""
        self._run_in_thread(lambda: [self._store.put(number, key, value) for key, value in keys.items()])

    def _run_in_thread(self, act: Callable[[], object] | None) -> None:
        self._todo.put(act)
        with suppress(OSError):
            self._wake.send(b"\0")

    def _do(self) -> None:
        self._woken.recv(1 << 12)
        with suppress(Empty):
            while (act := self._todo.get_nowait()) is not None:
                act()
            self._over = True

    def _serve(self) -> None:
        ticked_s = 0.0
        while not self._over:
            if (now := time.monotonic()) - ticked_s >= _TICK_S:
                ticked_s = now
                for connection in [c for c in self._open if now >= c.until_s]:
                    connection.time_out()
                self._listen()
            for key, _ in self._selector.select(_TICK_S):
                key.data()
        for connection in list(self._open):
            connection.close()
        for one in (self._selector, self._listener, self._woken, self._wake):
            one.close()

    def _listen(self) -> None:
        if not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._listening = True

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                peer, sender = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # most often too many open files
                self.log_limited("crowd", f"no connection can be accepted: {error.strerror}", self._describe_owners)
                if self._strangers:
                    return next(iter(self._strangers)).close()
                self._selector.unregister(self._listener)  # for a tick: select would return at once
                self._listening = False
                return
            connection = Request(self, peer, sender[0])
            self._open[connection] = self._strangers[connection] = None
            connection.advance()
            if len(self._strangers) > MOST_STRANGERS:
                next(iter(self._strangers)).close()
                text = f"more than {MOST_STRANGERS} connections have sent no request"
                self.log_limited("crowd", text, self._describe_owners)

    def _describe_owners(self) -> str:
        """Describe the owners of the connections in words."""
        port = self._listener.getsockname()[1]
        owners = ", ".join(f"{number} of uid {uid}" for uid, number in _owners(port).most_common(3))
        holders = f"Another program holds them ({owners or 'from elsewhere'}), see: ss -tnp dport = :{port}"
        return f"; the oldest are closed to make room for ranks. {holders}"

    def mark_authenticated(self, connection: Request) -> None:
        """Note that a connection has shown the token."""
        self._strangers.pop(connection, None)

    def forget(self, connection: Request) -> None:
        """Note that a connection is closed."""
        self._open.pop(connection, None)
        self._strangers.pop(connection, None)

    def select_events(self, connection: Request, events: int) -> None:
        """Set the events at which a connection advances; 0: none."""
        if connection.events == events:
            return
        if connection.events and events:
            self._selector.modify(connection.peer, events, connection.advance)
        elif events:
            self._selector.register(connection.peer, events, connection.advance)
        else:
            self._selector.unregister(connection.peer)
        connection.events = events

    def put(self, number: int, key: str, value: bytes) -> None:
        """Store a value of a rank of this host."""
        if self._store.put(number, key, value) and self._put is not None:
            self._put(number, key, value)

    def get(self, number: int, key: str, reply: Callable[[int, bytes], None]) -> Callable[[], None] | None:
        """Reply now or later; return a function that cancels a waiting request, None if there was a reply."""
        return None if self._store.get(number, key, reply) else partial(self._store.forget, key, reply)

    def log_limited(self, kind: str, text: str, more: Callable[[], str] = str) -> None:
        """Log a line; the more lines of a kind, the rarer."""
        self._counts[kind] += 1
        number = self._counts[kind]
        few = number <= (_LOGGED if kind == "refused" else 1)
        if few or (number > _LOGGED and number & (number - 1) == 0):
            self._log(f"rendezvous: {text}{'' if few else f', the {number}th'}{more()}")


def _owners(port: int) -> Counter[int]:
    """Count the connections to a port of this host by the user who owns them."""
    found: Counter[int] = Counter()
    with suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[2].endswith(f":{port:04X}") and fields[3] == "01":
                found[int(fields[7])] += 1
    return found
