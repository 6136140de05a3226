"""A rank's connection to the driver of its elastic job. The module `channel` lists the messages."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.runtime.channel import BEAT_S, HELD, VARIABLE, Channel, hold_lifeline
from hvdtrain.runtime.environment import horovod_numbers

EXIT_ALONE = 1
"""Exit code of a rank that has lost its driver."""

_MOST_ERROR_CHARACTERS = 4000
_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


class NoPlace(Exception):
    """The job continues or ends without this rank."""


class JobFailed(NoPlace):
    """The job ends, because it has failed."""


@dataclass(frozen=True)
class Place:
    """The place of this process in one round: the content of the message `round`."""

    round: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    host: str
    interface: str
    store: str
    timeout_s: int

    def variables(self) -> dict[str, str | None]:
        """Return the environment variables that Horovod reads."""
        return {
            **horovod_numbers({name: getattr(self, name) for name in _NUMBERS}),
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_GLOO_IFACE": self.interface or None,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.store,
            # The address contains the port, before token and round; Horovod's suffix becomes part of the path.
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.timeout_s),
        }


@dataclass
class Heartbeat:
    """Functions that return the values of the message `alive`, for a rank that has not begun a step by default."""

    step: Callable[[], int] = lambda: 0
    idle_s: Callable[[], float] = lambda: 0.0
    waiting: Callable[[], bool] = lambda: False


class DriverClient:
    """The rank's end of the connection. Its own threads receive messages and send heartbeats.

    ``exit`` ends this process when the driver is lost.
    """

    def __init__(self, channel: Channel, exit: Callable[[int], Any] = os._exit) -> None:
        self.round = 0  # the current or last round; 0 before the first
        self.heartbeat = Heartbeat()  # the values to report
        self.wake: Callable[[], object] = lambda: None  # wakes the training thread where it waits for a lost rank
        self.on_change: Callable[[], object] = lambda: None  # called in our thread when the round must end
        self._channel = channel
        self._exit = exit
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._changed = False
        self._draining = False
        self._must_leave = False
        self._stopping = False
        self._broken = 0
        self._leaving = False
        self._lock = threading.Lock()

    def start(self) -> DriverClient:
        """Start the threads."""
        for run in (self._listen, self._send_heartbeats):
            threading.Thread(target=run, name=f"client {run.__name__}", daemon=True).start()
        return self

    def join(self, why: str, text: str = "", step: int = -1) -> Place:
        """Request a place, and wait for it. The parameters are those of the message `join`.

        Errors: NoPlace if there is none; JobFailed, a subclass, if the job has failed.
        """
        self._channel.send("join", after=self.round, why=why, text=text[:_MOST_ERROR_CHARACTERS], step=step)
        while True:
            try:
                answer = self._answers.get(timeout=0.2)  # with a timeout, so that signal handlers run
            except queue.Empty:
                continue
            if answer["type"] == "end":
                raise (JobFailed if answer.get("failed") is True else NoPlace)(str(answer.get("why", "")))
            place = Place(**{name: answer[name] for name in Place.__dataclass_fields__})
            with self._lock:
                self.round = place.round
            self._draining = False  # the driver remembers it, and ends the round when there are enough others
            return place

    def is_broken(self) -> bool:
        """Check whether this round has lost a rank."""
        return self._broken == self.round > 0

    def is_changed(self) -> bool:
        """Check whether this round must end."""
        return self._changed

    def is_leaving(self) -> bool:
        """Check whether this rank must leave when the round ends: it got a SIGTERM, or has no slot any more."""
        return self._must_leave or self._draining

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        """Return the requests of this rank's next step. SIGTERM to this rank alone makes it leave; the run continues.

        ``requests``: how often each came; ``changed``, ``terminate``: indices of the request to end the round, and of
        SIGTERM.
        """
        requests = list(requests)
        if requests[terminate] and not self._stopping:
            requests[terminate] = 0
            self._draining = True
            self._channel.send("drain")
        if self._changed or self._draining:
            requests[changed] = 1
        return requests

    def report_leaving(self, why: str) -> None:
        """Report that this rank has finished and will exit."""
        self._leaving = True
        self._channel.send("leaving", why=why)

    def report_wrong(self, rank: int) -> None:
        """Report that a rank of this round has computed wrong bits."""
        self._channel.send("wrong", round=self.round, rank=rank)

    def _listen(self) -> None:
        for message in self._channel.messages():
            self._handle(message)
        if not self._leaving:
            self._exit(EXIT_ALONE)

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind in ("round", "end"):
            # here, in the order of messages: later messages belong to the new round
            self._changed = self._must_leave = False
            self._answers.put(dict(message))
        elif kind == "changed":
            self._changed = True
            self._must_leave = message.get("leaves") is True
            self.on_change()
        elif kind == "broken":
            with self._lock:
                self._broken = int(message["round"])
                if self._broken == self.round:
                    self.wake()
        elif kind == "stacks":
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            sys.stderr.write(f"hvdtrain: where this rank hangs:\n{stack}")
            sys.stderr.flush()
        elif kind == "stop":
            self._stopping = True
            os.kill(os.getpid(), signal.Signals[str(message["signal"])])

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(BEAT_S)
            beat = self.heartbeat
            facts = {"step": beat.step(), "idle_s": round(beat.idle_s(), 3), "waiting": beat.waiting()}
            self._channel.send("alive", round=self.round, **facts)


def connect_to_driver(environ: Mapping[str, str]) -> DriverClient | None:
    """Return this process's connection to its driver; None where hvdtrain's driver did not start it.

    Errors: ConfigError if the variable names no socket.
    """
    if not (text := environ.get(VARIABLE, "")):
        return None
    try:
        end = socket.socket(fileno=int(text))
        os.set_inheritable(end.fileno(), False)
    except (ValueError, OverflowError, OSError) as error:
        raise ConfigError(
            f"{VARIABLE}={text} is no connection to hvdtrain's driver",
            expected="the number of a socket, which hvdtrain launch gives to its ranks",
            found=str(error),
            next_step=f"unset {VARIABLE}, and start ranks by hvdtrain launch, mpirun or horovodrun",
        ) from None
    channel = Channel(end)
    if hold_lifeline(environ):
        channel.send(HELD)
    return DriverClient(channel).start()
