"""The doctor's side of a probe: what it is asked, what it answers, and when."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.launch.agent_link import AgentLink


class SilentError(Exception):
    """A host does not answer; the message says why, as far as anybody knows."""


@dataclass(frozen=True)
class Answer:
    """What a host answered.

    Attributes:
        value: what it was asked for.
        sent_ns, came_ns: when the question was sent and the answer came, by this host's clock.
    """

    value: Any
    sent_ns: int
    came_ns: int


class Asked:
    """A host whose probe was started. It is asked one thing at a time, from any thread.

    Args:
        host: its name.
        argv: what starts the probe.
        environment: of that process.

    Errors:
        OSError: it cannot be started.
    """

    def __init__(self, host: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self.host = host
        self._numbers = itertools.count(1)
        self._heard: queue.SimpleQueue[tuple[dict[str, Any], int]] = queue.SimpleQueue()
        self._link = AgentLink(host, argv, environment, lambda seen: self._heard.put((seen[1], time.time_ns())))
        self._link.start()

    def greet(self, hello: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Say hello; what it says of itself.

        Errors:
            SilentError: it says nothing, or has ended.
        """
        self._link.send("hello", **hello)
        message, _ = self._hear("says", time.monotonic() + timeout_s)
        return dict(message["facts"])

    def ask(self, what: str, timeout_s: float, **facts: Any) -> Answer:
        """Ask it something.

        Errors:
            SilentError: it does not answer, or what it was asked for fails there.
        """
        number = next(self._numbers)
        until_s, sent_ns = time.monotonic() + timeout_s, time.time_ns()
        self._link.send("ask", number=number, what=what, **facts)
        while True:
            message, came_ns = self._hear("answer", until_s)
            if message["number"] != number:  # of a question that was given up
                continue
            if "error" in message:
                raise SilentError(str(message["error"]))
            return Answer(message["value"], sent_ns, came_ns)

    def let_go(self) -> None:
        """Let it end, without waiting for that."""
        self._link.close()

    def kill(self) -> None:
        """End what reaches it; it ends too, as soon as it sees that."""
        self._link.kill()
        self._link.close()

    def _hear(self, kind: str, until_s: float) -> tuple[dict[str, Any], int]:
        while True:
            try:
                message, came_ns = self._heard.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise SilentError("timed out: no word of it") from None
            if message["type"] == "gone":
                self._heard.put((message, came_ns))  # for who asks next
                raise SilentError(str(message["why"]))
            if message["type"] == kind:
                return message, came_ns
