"""The messages between the ranks of an elastic job and their driver: JSON lines over an inherited socket.

A message is an object with a "type". Other programs of hvdtrain use the same format over pipes.

::

    driver  <- stdin/stdout, by ssh to another host ->  agent of a host  <- socketpair ->  ranks of that host

It needs no open port and no name resolution: a process that holds the socket is part of the job.

From a rank:
    join     {"after", "why", "text", "step"}   it is ready and asks for a place in the next round. `after`: its last
             round, 0 for none; `why`: started | failed | changed; `text`: of the error that made it fail; `step`:
             optimizer steps in its memory, -1 for no state yet
    alive    {"round", "step", "idle_s", "waiting"}   heartbeat, every `BEAT_S`, from its own thread. `step`: optimizer
             steps begun; `idle_s`: since the training thread last made progress; `waiting`: whether that thread waits
             in a collective
    drain    {}      it received SIGTERM: it leaves at the next step boundary, the other ranks continue
    leaving  {"why"}   its training has ended (finished, stop_at, a signal's name), and it exits by itself
    wrong    {"round", "rank"}   that rank has computed wrong bits: its host should be left out
    held     {}      it holds its `lifeline`; only the agent reads this

To a rank:
    round    {"round", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "host", "interface",
             "store", "timeout_s"}   its place. `round`: counted from 1; `store`: address, token and round of the
             rendezvous, as in `HOROVOD_GLOO_RENDEZVOUS_ADDR`; `host`: unique to the host; `interface`: by which ranks
             reach each other, "" for any; `timeout_s`: how long to wait for a silent rank
    changed  {"why", "leaves"}   others wait to join, or some must leave: at the next step boundary all leave the round
             and join. `leaves`: whether this rank must leave
    broken   {"round", "why"}   a rank of the round is lost: leave now; a rank that waits in a collective is woken
    stop     {"signal"}   the whole job saves and ends, as if every rank had received the signal
    stacks   {}      it hangs, and will be killed: write the stack to stderr
    end      {"why", "failed"}   there is no place for it: exit with 0. `failed`: the job has failed

A receiver skips messages of unknown type.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 1 << 22
"""Longest line that is read."""

VARIABLE = "HVDTRAIN_CHANNEL"
"""The variable with the file descriptor of a rank's end of the socketpair."""
HELD = "held"
"""The one message that is for the agent."""
BEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""
_MOST_OF_RANK_BYTES = 1 << 20

LIFELINE = "HVDTRAIN_LIFELINE"
"""The variable with the file descriptor of the memory of a `Lifeline`."""

_NAME = "lifeline"
_BYTES = mmap.PAGESIZE
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_MOST_OF_ATTRIBUTES = 64

_libc = ctypes.CDLL(None)


def encode_message(kind: str, facts: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps({"type": kind, **facts}).encode() + b"\n"


class MessageWriter:
    """Writes whole messages, from any thread. When nobody reads them any more, they are lost."""

    def __init__(self, end: IO[bytes] | socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, kind: str, **facts: Any) -> bool:
        """Write a message; False where nobody reads any more."""
        return self.write(encode_message(kind, facts))

    def write(self, data: bytes) -> bool:
        """Write whole lines; False where nobody reads any more."""
        try:
            with self._lock:
                if isinstance(self._end, socket.socket):
                    self._end.sendall(data)
                else:
                    self._end.write(data)
                    self._end.flush()
        except (OSError, ValueError):
            return False
        return True


def read_messages(end: IO[bytes] | socket.socket, most_bytes: int = MOST_BYTES) -> Iterator[dict[str, Any]]:
    """Yield messages until the other end is closed, or a line is longer than `most_bytes`. Skip other lines."""
    for line in _socket_lines(end, most_bytes) if isinstance(end, socket.socket) else _stream_lines(end, most_bytes):
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and isinstance(message.get("type"), str):
            yield message


def _stream_lines(stream: IO[bytes], most_bytes: int) -> Iterator[bytes]:
    while (line := stream.readline(most_bytes)).endswith(b"\n"):
        yield line


def _socket_lines(end: socket.socket, most_bytes: int) -> Iterator[bytes]:
    rest = b""  # not by makefile: a socket that is closed while its file is read stays open
    while len(rest) <= most_bytes:
        try:
            data = end.recv(1 << 16)
        except OSError:
            return
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


class Channel:
    """One end of the connection; it closes its socket. Any thread may send, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.send = MessageWriter(end).send

    def messages(self) -> Iterator[dict[str, Any]]:
        """Return the messages until the other end is closed."""
        return read_messages(self._end, _MOST_OF_RANK_BYTES)

    def stop_reading(self) -> None:
        """Let `messages` end after what has arrived so far."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection; `messages` ends."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Lifeline:
    """Detects the death of a process before the kernel frees its memory, by a lock that the kernel releases. On Linux.

    After a kill, open files are closed and the parent is notified only when the memory is freed: 40 ms for a process
    with torch, more with more memory. The kernel releases robust locks (`get_robust_list(2)`,
    `pthread_mutexattr_setrobust(3)`) before that. The lock is in memory that both processes share; the descriptor
    may be closed afterwards.
    """

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._lock = ctypes.c_char.from_buffer(self._memory)

    def prepare(self) -> None:
        """Initialise the lock, unlocked. Errors: OSError."""
        attributes = ctypes.create_string_buffer(_MOST_OF_ATTRIBUTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(ctypes.byref(self._lock), attributes))

    def hold(self) -> None:
        """Hold the lock until this thread ends, which must not be before the process ends. Errors: OSError."""
        _check(_libc.pthread_mutex_lock(ctypes.byref(self._lock)))

    def wait(self) -> bool:
        """Wait until the holder ends: killed, by itself, or by exec. Returns False if there was no holder."""
        return bool(_libc.pthread_mutex_lock(ctypes.byref(self._lock)) == errno.EOWNERDEAD)


def make_lifeline() -> tuple[Lifeline, int] | None:
    """Return a lifeline and the file descriptor for a child; None where the system does not support it."""
    with suppress(OSError, AttributeError):
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, _BYTES)
            lifeline = Lifeline(descriptor)
            lifeline.prepare()
        except BaseException:
            os.close(descriptor)
            raise
        return lifeline, descriptor
    return None


def hold_lifeline(environ: Mapping[str, str]) -> bool:
    """Hold the lifeline of this process, if its parent has given it one; return whether it does."""
    text = environ.get(LIFELINE, "")
    if not text.isdigit() or threading.current_thread() is not threading.main_thread():
        return False
    with suppress(OSError, ValueError):
        # Child programs inherit the variable, but may use the descriptor for another file.
        if not str(Path(f"/proc/self/fd/{text}").readlink()).startswith(f"/memfd:{_NAME} "):
            return False
        lifeline = Lifeline(int(text))
        os.close(int(text))
        lifeline.hold()
        # Keep it mapped after the interpreter's cleanup: the kernel reads the lock there.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(lifeline))
        return True
    return False


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))
