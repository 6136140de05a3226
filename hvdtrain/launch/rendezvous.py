"""The HTTP store that Horovod's C++ asks when it starts: on one address, behind a token, for bytes it never reads.

Horovod builds the address ``http://ADDR:PORT/SCOPE/KEY``. With ``ADDR`` = ``127.0.0.1:4711/TOKEN/ROUND`` and ``PORT``
= 0 the path is ``/TOKEN/ROUND:0/SCOPE/KEY``: each request carries the token, and each round has a store of its own.
"""

from __future__ import annotations

import hmac
import itertools
import re
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from socket import socket
from typing import Any

Put = Callable[[int, str, bytes], None]
Get = Callable[[int, str], tuple[int, bytes]]

MOST_BYTES = 1 << 16
"""Of a value; Gloo's are some hundred."""

_MOST_REQUESTS = 1024
_MOST_HEAD_BYTES = 1 << 14
_TOLD = 20
"""Requests that are refused of which each is told; then each power of two."""
_SOCKET_TIMEOUT_S = 30.0
_PATH = re.compile(r"/([A-Za-z0-9_-]{1,128})/([0-9]{1,9}):0/([A-Za-z0-9._@:-]{1,400}/[A-Za-z0-9._@:-]{1,400})")


class Rendezvous:
    """The server of one host.

    Args:
        put: called with round, key and value of each PUT.
        get: the status and the value for round and key; it may take a few seconds until the key is there.
        log: called with a line for each request that is refused.
        host: the IPv4 address of this host by which it is reached; by no other one it is.
    """

    def __init__(self, put: Put, get: Get, log: Callable[[str], None], host: str = "127.0.0.1") -> None:
        self.token = secrets.token_urlsafe(32)
        self._put, self._get, self._log = put, get, log
        self._room = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._refused = itertools.count(1)
        outer = self

        class Handler(_Handler):
            rendezvous = outer

        self._host = host
        self._server = _Server((host, 0), Handler)
        self._server.room = self._room

    @property
    def address(self) -> str:
        """Host, port and token; a round's number behind it makes what ranks are given."""
        return f"{self._host}:{self._server.server_port}/{self.token}"

    def start(self) -> None:
        """Serve from now on, in a thread."""
        threading.Thread(target=self._server.serve_forever, name="rendezvous", daemon=True).start()

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, length: str | None, read: Callable[[int], bytes]) -> tuple[int, bytes]:
        """The status and the body for a request. `length`: its header; `read`: gives so many bytes of its body."""
        found = _PATH.fullmatch(path)
        if found is None:
            return 404, b""
        if not hmac.compare_digest(found[1], self.token):
            return 403, b""
        number, key = int(found[2]), found[3]
        if method == "GET":
            return self._get(number, key)
        if method == "PUT":
            if length is None or not re.fullmatch("[0-9]{1,9}", length) or int(length) > MOST_BYTES:
                return 413, b""
            self._put(number, key, read(int(length)))
        return 200, b""

    def refused(self, method: str, status: int, sender: str) -> None:
        """Log it in a line, without the path: that may hold the token. Of many ever fewer are."""
        count = next(self._refused)
        if count <= _TOLD or count & (count - 1) == 0:
            number = "" if count <= _TOLD else f", the {count}th"
            self._log(f"rendezvous: refused a {method} of {sender} with {status}{number}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    room: threading.BoundedSemaphore

    def process_request(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        if not self.room.acquire(blocking=False):
            return self.shutdown_request(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """A connection that broke is nobody's error here."""


class _Short:
    """A request whose head ends after some bytes, though it goes on: one without end takes memory from all others."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._room = _MOST_HEAD_BYTES
        self.read, self.close = stream.read, stream.close

    def readline(self, most: int) -> bytes:
        line = self._stream.readline(min(most, self._room)) if self._room else b""
        self._room -= len(line)
        return line


class _Handler(BaseHTTPRequestHandler):
    rendezvous: Rendezvous
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = _Short(self.rfile)  # type: ignore[assignment]

    def do_GET(self) -> None:
        self._do()

    def do_PUT(self) -> None:
        self._do()

    def do_DELETE(self) -> None:
        self._do()

    def _do(self) -> None:
        status, body = self.rendezvous.answer(
            self.command, self.path, self.headers.get("Content-Length"), self.rfile.read
        )
        if status not in (200, 404, 410) or (status == 404 and not _PATH.fullmatch(self.path)):
            self.rendezvous.refused(self.command, status, self.address_string())
        self._send(status, body)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request of Horovod's, without repeating any of it."""
        self.rendezvous.refused("request", code, self.address_string())
        self._send(code, b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
