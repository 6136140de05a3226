"""Ports that a host opens for others, and connections to them; all on this host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hvdtrain.doctor.hosts import host_probe
from hvdtrain.doctor.hosts.host_probe import Listener, listen, try_connection
from tests.support.launch import TIMEOUT_S

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "_WAIT_S"):
        monkeypatch.setattr(host_probe, name, TIMEOUT_S)


@contextmanager
def listening(say: bytes | None) -> Iterator[Listener]:
    """Something else that listens: says something to whoever comes, or nothing at all."""
    with socket.socket() as server:
        server.bind((HERE, 0))
        server.listen()

        def serve() -> None:
            came, _ = server.accept()
            with came:
                if say is None:
                    came.recv(1000)
                    came.recv(1000)  # until the other goes
                else:
                    came.sendall(say)
                    came.recv(1000)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Listener(HERE, server.getsockname()[1], "x" * 32)
        thread.join(TIMEOUT_S)


def test_a_request_with_the_token_is_answered() -> None:
    door = listen(HERE)
    assert try_connection(door) == ""
    assert try_connection(replace(door, token="0" * 32)) == "stranger"
    assert listen(HERE).token != door.token
    with socket.create_connection((HERE, door.port)) as end:
        end.sendall(b"0" * 32)
        assert end.recv(100) == b"", "a stranger is told nothing"


def test_a_door_is_on_its_address_alone() -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", listen(HERE).port))
    with pytest.raises(OSError):
        listen("192.0.2.1")


def test_each_fault_is_distinguished_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        assert try_connection(Listener(HERE, closed.getsockname()[1], "x" * 32)) == "refused"
    with listening(b"SSH-2.0-OpenSSH_9.6 and more than was asked for") as door:
        assert try_connection(door) == "stranger"
    monkeypatch.setattr(host_probe, "CONNECT_S", 0.2)
    with listening(None) as door:
        assert try_connection(door) == "timeout"
