"""The HTTP store of a host: what Horovod asks it gets, all else is refused without being read."""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection

import pytest

from hvdtrain.launch import rendezvous
from hvdtrain.launch.rendezvous import MOST_BYTES, MOST_STRANGERS, Rendezvous
from tests.support.launch import TIMEOUT_S


class Served:
    """A server, its store in round 3, what was put and what it logged."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, str], bytes] = {}
        self.log: list[str] = []
        self.server = Rendezvous(self.log.append, put=self._put)
        self.server.start()
        self.address, self.token = self.server.address.split("/")

    def _put(self, number: int, key: str, value: bytes) -> None:
        self.keys[number, key] = value

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        with closing(HTTPConnection(self.address, timeout=TIMEOUT_S)) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def close(self) -> None:
        """Free what a process has until its end."""
        loop, tasks = self.server._loop, self.server._until_s
        loop.call_soon_threadsafe(loop.stop)
        self.server._thread.join()

        async def cancel() -> None:
            await asyncio.sleep(0)  # a task that is cancelled before its start would not close its connection
            for task in list(tasks):
                task.cancel()
            while tasks:
                await asyncio.sleep(0)

        loop.run_until_complete(cancel())
        loop.close()
        self.server._listener.close()


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    one.server.open(3, {})
    yield one
    one.close()


def test_horovods_requests(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert served.address.startswith("127.0.0.1:"), "this host alone"
    monkeypatch.setattr(rendezvous, "_POLL_S", 0.0)
    path = f"/{served.token}/3:0/local_my-host.x@y/0"
    value = random.Random(0).randbytes(136 * 1023)  # the addresses of a thousand ranks
    assert served.ask("GET", path) == (404, b"")
    assert served.ask("PUT", path, value) == (200, b"")
    assert served.ask("GET", path) == (200, value)
    assert served.ask("DELETE", path) == (200, b"")
    assert served.ask("GET", path.replace("/3:0", "/2:0")) == (410, b"")
    assert served.keys == {(3, "local_my-host.x@y/0"): value} and not served.log


def test_an_early_request_gets_the_value_when_it_is_set(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_POLL_S", TIMEOUT_S)
    here, of_another_host = (f"/{served.token}/3:0/global/{rank}" for rank in (0, 1))
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(served.ask, "GET", path) for path in (here, of_another_host)]
        served.ask("PUT", here, b"zero")
        served.server.add(2, {"global/1": b"of another round"})
        served.server.add(3, {"global/1": b"one"})
        assert [one.result(TIMEOUT_S) for one in asked] == [(200, b"zero"), (200, b"one")]
    assert served.keys == {(3, "global/0"): b"zero"}


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize(
    ("methods", "path", "status"),
    [
        ("POST PATCH OPTIONS", "/TOKEN/3:0/scope/key", 501),
        ("GET PUT DELETE", "/wrong-token/3:0/scope/key", 403),
        ("GET PUT DELETE", "/TOKEN/3:0/../../key", 404),
        *(("GET PUT", path, 404) for path in ("/3:0/scope/key", "/scope/key", "/worker_addresses/a:0", "/")),
        *(("GET PUT", f"/TOKEN/3:0/scope{path}", 404) for path in ("", "/key/more", "/" + "k" * 500)),
        *(("GET PUT", f"/TOKEN/{number}/scope/key", 404) for number in ("3:1", "x:0")),
    ],
)
def test_odd_requests_are_refused_and_logged(served: Served, methods: str, path: str, status: int) -> None:
    for number, method in enumerate(methods.split(), 1):
        body = pickle.dumps(Evil()) if method in ("PUT", "POST") else None
        assert served.ask(method, path.replace("TOKEN", served.token), body) == (status, b"")
        assert not served.keys and len(served.log) == number and served.token not in served.log[-1]


@pytest.mark.parametrize("length", [str(MOST_BYTES + 1), "-1", "1e3", "99999999999999999999", "", "0x10"])
def test_bodies_without_a_sensible_length_are_refused(served: Served, length: str) -> None:
    with served.connect() as connection:
        head = f"PUT /{served.token}/3:0/scope/key HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(1 << 16)
    assert not served.keys and len(served.log) == 1


def test_a_request_that_is_no_http_gets_no_answer(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(b"\x80\x04\x95 pickle or what\r\n\r\n")
        assert connection.recv(1 << 16) == b""
    assert len(served.log) == 1 and "pickle" not in served.log[0]


def test_an_endless_header_is_cut_off(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(f"PUT /{served.token}/3:0/scope/key HTTP/1.1\r\nX: ".encode() + b"y" * 30_000)
        assert b" 4" in connection.recv(1 << 16)[:12]
    assert not served.keys


def test_repeated_refusals_do_not_fill_the_log(served: Served) -> None:
    for _ in range(200):
        served.server.log_limited("refused", "refused a GET")
    assert len(served.log) == 20 + len([32, 64, 128]) and served.log[-1].endswith("the 128th")


def test_idle_connections_block_no_rank(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers that say nothing, or say it slowly, have few places, and the oldest of them make room."""
    monkeypatch.setattr(rendezvous, "STRANGER_S", TIMEOUT_S)
    drip = f"PUT /{served.token}/3:0/scope/key HTTP/1.1\r\nX: ".encode()
    connections = []
    for number in range(3 * MOST_STRANGERS):
        connections.append(served.connect())
        if number % 2:
            connections[-1].sendall(drip[: 1 + number % len(drip)])
    assert served.ask("PUT", f"/{served.token}/3:0/scope/key", b"x") == (200, b"") and served.keys
    assert len(served.server._strangers) <= MOST_STRANGERS
    connections[0].setblocking(False)
    assert connections[0].recv(1) == b"", "the oldest is closed"
    assert served.log[0].endswith(f"dport = :{served.address.split(':')[1]}")
    for one in connections:
        one.close()


def test_a_slow_request_has_a_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "STRANGER_S", 0.1)
    with served.connect() as connection, suppress(ConnectionError):
        while not served.log:
            connection.sendall(b"x")
            threading.Event().wait(0.01)
        assert connection.recv(1) == b""
    assert "without a request in" in served.log[0]


def test_a_rank_that_waits_or_sends_slowly_is_no_stranger(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_POLL_S", TIMEOUT_S)
    waiting, sending = served.connect(), served.connect()
    waiting.sendall(f"GET /{served.token}/3:0/global/1 HTTP/1.1\r\n\r\n".encode())
    sending.sendall(f"PUT /{served.token}/3:0/global/1 HTTP/1.1\r\nContent-Length: 2\r\n\r\n1".encode())
    others = [served.connect() for _ in range(2 * MOST_STRANGERS)]
    served.ask("PUT", f"/{served.token}/3:0/global/0", b"")
    sending.sendall(b"2")
    assert sending.makefile("rb").readline().startswith(b"HTTP/1.1 200")
    assert waiting.makefile("rb").read().endswith(b"\r\n\r\n12")
    for connection in (waiting, sending, *others):
        connection.close()
