"""The HTTP store of a host: what Horovod asks it gets, all else is refused without being read."""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from hvdtrain.launch.rendezvous import MOST_BYTES, Rendezvous
from tests.support.launch import TIMEOUT_S


class Served:
    """A server over a dict, and what it logged."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, str], bytes] = {}
        self.log: list[str] = []
        self.server = Rendezvous(self._put, self._get, self.log.append)
        self.server.start()
        self.address, self.token = self.server.address.split("/")

    def _put(self, number: int, key: str, value: bytes) -> None:
        self.keys[number, key] = value

    def _get(self, number: int, key: str) -> tuple[int, bytes]:
        value = self.keys.get((number, key))
        return (404, b"") if value is None else (200, value)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = HTTPConnection(self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def serving() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.close()


@pytest.fixture
def served(serving: Served) -> Served:
    serving.keys.clear()
    serving.log.clear()
    serving.server._refused = itertools.count(1)
    return serving


def test_what_horovod_asks(served: Served) -> None:
    path = f"/{served.token}/3:0/local_my-host.x@y/0"
    assert served.ask("GET", path) == (404, b"")
    assert served.ask("PUT", path, b"\x00\xff bytes") == (200, b"")
    assert served.ask("GET", path) == (200, b"\x00\xff bytes")
    assert served.ask("DELETE", path) == (200, b"")
    assert served.keys == {(3, "local_my-host.x@y/0"): b"\x00\xff bytes"} and not served.log


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/wrong-token/3:0/scope/key", 403),
        ("/3:0/scope/key", 404),
        ("/scope/key", 404),
        ("/worker_addresses/a:0", 404),
        ("/TOKEN/3:0/../../key", 404),
        ("/TOKEN/3:0/scope", 404),
        ("/TOKEN/3:0/scope/key/more", 404),
        ("/TOKEN/3:1/scope/key", 404),
        ("/TOKEN/x:0/scope/key", 404),
        ("/TOKEN/3:0/scope/" + "k" * 500, 404),
        ("/", 404),
    ],
)
def test_odd_requests_are_refused_and_logged(served: Served, method: str, path: str, status: int) -> None:
    body = pickle.dumps(Evil()) if method in ("PUT", "POST") else None
    got, text = served.ask(method, path.replace("TOKEN", served.token), body)
    assert got == (status if method in ("GET", "PUT", "DELETE") else 501) and text == b""
    assert not served.keys and len(served.log) == 1 and served.token not in served.log[0]


@pytest.mark.parametrize("length", [str(MOST_BYTES + 1), "-1", "1e3", "99999999999999999999", "", "0x10"])
def test_bodies_without_a_sensible_length_are_refused(served: Served, length: str) -> None:
    host, port = served.address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        head = f"PUT /{served.token}/3:0/scope/key HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(1 << 16)
    assert not served.keys and len(served.log) == 1


def test_what_is_no_http_gets_no_answer(served: Served) -> None:
    host, port = served.address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"\x80\x04\x95 pickle or what\r\n\r\n")
        assert connection.recv(1 << 16) == b""
    assert len(served.log) == 1 and "pickle" not in served.log[0]


def test_a_head_without_end_is_cut_off(served: Served) -> None:
    host, port = served.address.split(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"PUT /{served.token}/3:0/scope/key HTTP/1.1\r\nX: ".encode() + b"y" * 30_000)
        assert b" 4" in connection.recv(1 << 16)[:12]
    assert not served.keys


def test_who_is_refused_ever_again_fills_no_log(served: Served) -> None:
    for _ in range(200):
        served.server.refused("GET", 403, "127.0.0.1")
    assert len(served.log) == 20 + len([32, 64, 128]) and served.log[-1].endswith("the 128th")


def test_it_listens_on_this_host_alone(served: Served) -> None:
    assert served.address.startswith("127.0.0.1:")


def test_who_only_connects_holds_nobody_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.server._server.RequestHandlerClass, "timeout", 1e6)
    host, port = served.address.split(":")
    idle = [socket.create_connection((host, int(port)), timeout=TIMEOUT_S) for _ in range(50)]
    done = threading.Thread(target=served.ask, args=("PUT", f"/{served.token}/1:0/scope/key", b"x"))
    done.start()
    done.join(TIMEOUT_S)
    assert served.keys
    for connection in idle:
        connection.close()
