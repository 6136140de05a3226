"""One request to a host's store, read and answered in pieces without ever waiting for a client.

Not `http.server`: it uses a thread per connection, and a client that sends slowly occupies it.
"""

from __future__ import annotations

import hmac
import re
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdtrain.launch.rendezvous_store import ABSENT, MOST_BYTES

if TYPE_CHECKING:
    from hvdtrain.launch.rendezvous import Rendezvous

STRANGER_S = 5.0
"""Time from the connection to the end of the request's head, without the token."""

_POLL_S = 4.0
"""A request for a missing key is answered after this time; Horovod asks again."""
_REQUEST_S = 30.0
"""Time for a rank to send or read a value."""
_MOST_HEAD_BYTES = 1 << 14
_HEAD = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,2048}) HTTP/1\.[01]\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([^\r\n]*?)[ \t]*\r\n", re.IGNORECASE)
_PATH = re.compile(rb"/([A-Za-z0-9_-]{1,128})/([0-9]{1,9}):0/([A-Za-z0-9._@:-]{1,400}/[A-Za-z0-9._@:-]{1,400})")


class Request:
    """One connection: a head, perhaps a body, and the answer.

    `sender`: the address of the peer, for messages; `until_s`: the deadline; `events`: those at which it advances.
    """

    def __init__(self, server: Rendezvous, peer: socket.socket, sender: str) -> None:
        peer.setblocking(False)
        self.peer, self._sender, self._server = peer, sender, server
        self.until_s = time.monotonic() + STRANGER_S
        self.events = 0
        self._data = b""
        self._need = -1
        self._wants: tuple[int, str] | None = None
        self._cancel: Callable[[], None] | None = None
        self._left: memoryview | None = None
        self._refused = self._closed = False

    def advance(self) -> None:
        """Read or write as much as possible without waiting."""
        try:
            if self._left is None:
                self._read()
            elif self._left:
                self._write()
            elif not self.peer.recv(1 << 16):  # refused; closing with unread data would reset the connection
                self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if not self._closed:
            self._server.select_events(self, selectors.EVENT_WRITE if self._left else selectors.EVENT_READ)

    def time_out(self) -> None:
        """Handle the deadline."""
        if self._cancel is not None:
            self._cancel()
            return self._answer(ABSENT, b"")
        if self._need < 0 and not self._refused:
            text = f"closed a connection from {self._sender} without a request in {STRANGER_S:.0f} s"
            self._server.log_limited("late", text)
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        if self._cancel is not None:
            self._cancel()
        self._server.select_events(self, 0)
        self.peer.close()
        self._server.forget(self)

    def _read(self) -> None:
        data = self.peer.recv(1 << 16)
        if not data:
            return self.close()
        if self._cancel is not None:
            return  # it waits for its answer; more input is ignored
        self._data += data
        if self._need < 0:
            self._read_head()
        if self._wants is not None and len(self._data) >= self._need:
            number, key = self._wants
            self._server.put(number, key, self._data[: self._need])
            self._answer(200, b"")

    def _read_head(self) -> None:
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            if len(self._data) > _MOST_HEAD_BYTES:
                self._refuse("request", 431)
            return
        found = _HEAD.match(head + b"\r\n")
        if found is None:
            self._server.log_limited("refused", f"refused an invalid request from {self._sender}")
            return self.close()
        method, path = found[1].decode(), found[2]
        part = _PATH.fullmatch(path)
        if method not in ("GET", "PUT", "DELETE"):
            return self._refuse(method, 501)
        if part is None:
            return self._refuse(method, 404)
        if not hmac.compare_digest(part[1], self._server.token.encode()):
            return self._refuse(method, 403)
        self._server.mark_authenticated(self)
        self.until_s = time.monotonic() + _REQUEST_S
        number, key = int(part[2]), part[3].decode()
        self._need, self._data = 0, rest
        if method == "GET":
            self._cancel = self._server.get(number, key, self._answer)
            if self._cancel is not None:
                self.until_s = time.monotonic() + _POLL_S
        elif method == "DELETE":
            self._answer(200, b"")
        else:
            length = _LENGTH.search(head + b"\r\n")
            if length is None or not re.fullmatch(rb"[0-9]{1,9}", length[1]) or int(length[1]) > MOST_BYTES:
                return self._refuse(method, 413)
            self._need, self._wants = int(length[1]), (number, key)

    def _refuse(self, method: str, status: int) -> None:
        """Refuse the request and log it, without the path, which may contain the token."""
        self._refused = True
        self._server.log_limited("refused", f"refused a {method} from {self._sender} with {status}")
        self._answer(status, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self._cancel = self._wants = None
        if not self._refused:
            self.until_s = time.monotonic() + _REQUEST_S
        head = f"HTTP/1.1 {status} \r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self._left = memoryview(head.encode() + body)
        self.advance()

    def _write(self) -> None:
        assert self._left is not None
        while self._left:
            self._left = self._left[self.peer.send(self._left) :]
        if not self._refused:
            return self.close()
        self.peer.shutdown(socket.SHUT_WR)
