"""The doctor's connection to the probe on a host."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hvdtrain.launch.agent_link import AgentLink


class NoAnswerError(Exception):
    """A host does not answer. The message is the reason, if known."""


class ProbeClient:
    """The connection to a probe that `argv` starts. Any thread may ask, one question at a time.

    Errors: OSError if the process cannot be started.
    """

    def __init__(self, host: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[tuple[dict[str, Any], int]] = queue.SimpleQueue()
        self._link = AgentLink(host, argv, environment, lambda item: self._inbox.put((item[1], time.time_ns())))
        self._link.start()

    def greet(self, hello: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send the first message and return the facts about the host. Errors: NoAnswerError if there is no reply."""
        self._link.send("hello", **hello)
        message, _ = self._receive("says", time.monotonic() + timeout_s)
        return dict(message["facts"])

    def ask(self, what: str, timeout_s: float, **facts: Any) -> Any:
        """Ask a question. Errors: NoAnswerError if there is no answer, or the host reports an error."""
        return self.ask_timed(what, timeout_s, **facts)[1]

    def ask_timed(self, what: str, timeout_s: float, **facts: Any) -> tuple[int, Any, int]:
        """Return also when the question was sent and the answer received, in nanoseconds by this host's clock."""
        number = next(self._numbers)
        deadline_s, sent_ns = time.monotonic() + timeout_s, time.time_ns()
        self._link.send("ask", number=number, what=what, **msgspec.to_builtins(facts))
        while True:
            message, received_ns = self._receive("answer", deadline_s)
            if message["number"] != number:  # the late answer to a question that timed out
                continue
            if "error" in message:
                raise NoAnswerError(str(message["error"]))
            return sent_ns, message["value"], received_ns

    def close(self) -> None:
        """Let the probe end, without waiting for it."""
        self._link.close()

    def kill(self) -> None:
        """Kill the connection. The probe ends as soon as it notices."""
        self._link.kill()
        self._link.close()

    def _receive(self, kind: str, deadline_s: float) -> tuple[dict[str, Any], int]:
        while True:
            try:
                message, received_ns = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise NoAnswerError("timed out: no answer") from None
            if message["type"] == "gone":
                self._inbox.put((message, received_ns))  # for the next question
                raise NoAnswerError(str(message["why"]))
            if message["type"] == kind:
                return message, received_ns
