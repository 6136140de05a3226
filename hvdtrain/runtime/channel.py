"""What the ranks of an elastic job and their driver say to each other: JSON lines over a socket that is inherited.

::

    driver  <- stdin/stdout, by ssh where the host is another ->  agent of a host  <- socketpair ->  ranks of that host

No port is opened and no name is resolved for it: who holds the socket is part of the job. A message is an object with
a "type":

From a rank:
    join     {"after", "why", "text", "step"}   it is set up and wants a place in the next round. `after`: the round
             that it was in last, 0 for none; `why`: started | failed | changed; `text`: of the error where it failed;
             `step`: optimizer steps that its memory holds, -1 where that is nothing yet
    alive    {"round", "step", "idle_s", "waiting"}   every `BEAT_S`, from a thread of its own. `idle_s`: since its
             training thread last made progress; `waiting`: whether that waits in a collective
    drain    {}      it was told by SIGTERM to go: it leaves at the next step boundary, the others go on
    leaving  {"why"}   it has come to the end of training (finished, stop_at, a signal's name) and exits by itself
    held     {}      it holds its `lifeline`; goes no further than to the agent

To a rank:
    round    {"round", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "host", "interface",
             "store", "timeout_s"}   its place. `store`: what `HOROVOD_GLOO_RENDEZVOUS_ADDR` is set to, for this round
             alone; `host`: unique to the host; `interface`: by which ranks reach each other; "" where any will do
    changed  {"why"}   others wait to join, or some are to go: at the next step boundary all leave the round and join
    broken   {"round", "why"}   a rank of the round is gone: leave it now; what waits in a collective is woken
    stop     {"signal"}   the whole job is to save and end, as if every rank had got the signal
    stacks   {}      it hangs, and is about to be killed: it writes to stderr where it is
    end      {"why", "failed"}   there is no place any more: exit with 0. `failed`: nor a job

Messages of unknown type are passed over.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

VARIABLE = "HVDTRAIN_CHANNEL"
"""Names the file descriptor of a rank's end of the socketpair."""

HELD = "held"
"""The one message that is for the agent."""

BEAT_S = 1.0
"""Seconds between two `alive` of a rank."""

_MOST_BYTES = 1 << 20
"""Of a message."""


class Channel:
    """One end of it. Sending may be done from any thread, receiving from one.

    Args:
        end: a connected stream socket, which this owns from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, kind: str, **facts: Any) -> bool:
        """Send a message; False where nobody is there any more."""
        data = json.dumps({"type": kind, **facts}).encode() + b"\n"
        try:
            with self._lock:
                self._end.sendall(data)
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """What comes, until the other end is gone."""
        rest = b""
        while True:
            try:
                data = self._end.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MOST_BYTES:
                return
            yield from filter(None, map(parse, lines))

    def hear_no_more(self) -> None:
        """Have `messages` end with what has come so far."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let go of it; who waits for messages gets no more."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def parse(line: bytes) -> dict[str, Any] | None:
    """The message of a line, None where it is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("type"), str) else None
