from __future__ import annotations

import socket
from pathlib import Path

from hvdtrain.runtime.threads import open_sockets, shut_down_receiving


def _pair() -> tuple[socket.socket, socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    return server, near, far


def test_new_connections_are_cut_and_older_ones_are_not() -> None:
    old = _pair()
    before = open_sockets().keys()
    new = _pair()
    opened = open_sockets().keys() - before
    assert len(opened) == 3
    assert shut_down_receiving(opened) == 3  # with the one that listens: who waits for a connection is woken too
    assert new[1].recv(1) == new[2].recv(1) == b""
    old[1].sendall(b"x")
    assert old[2].recv(1) == b"x"
    for end in (*old, *new):
        end.close()


def test_received_bytes_are_read_first_and_sending_continues() -> None:
    server, near, far = _pair()
    far.sendall(b"x")
    assert near.recv(1, socket.MSG_PEEK) == b"x", "it has come"
    inode = next(inode for inode, number in open_sockets().items() if number == near.fileno())
    assert shut_down_receiving({inode}) == 1
    near.sendall(b"y")
    assert (near.recv(1), near.recv(1), far.recv(1)) == (b"x", b"", b"y")
    for end in (server, near, far):
        end.close()


def test_a_connection_closed_meanwhile_is_no_error(tmp_path: Path) -> None:
    before = open_sockets().keys()
    ends = _pair()
    opened = open_sockets().keys() - before
    for end in ends:
        end.close()
    others = _pair()  # may get the same file descriptors
    assert shut_down_receiving(opened) == 0
    others[1].sendall(b"x")
    assert others[2].recv(1) == b"x"
    for end in others:
        end.close()
