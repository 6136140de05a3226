"""A rank's place in an elastic job, as its driver gives and takes it. `channel` says what is exchanged."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.runtime.channel import BEAT_S, HELD, VARIABLE, Channel
from hvdtrain.runtime.environment import horovod_numbers
from hvdtrain.runtime.exit_lock import hold_lifeline

EXIT_ALONE = 1
"""Exit code of a rank whose driver is gone."""

_MOST_ERROR_CHARACTERS = 4000
"""Of an error that the driver is told."""

_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


class NoPlace(Exception):
    """The job goes on, or ends, without this rank."""


class JobFailed(NoPlace):
    """The job ends, for it has failed."""


@dataclass(frozen=True)
class Place:
    """Who this process is in one round.

    Attributes:
        round: counted from 1.
        rank, size, local_rank, local_size, cross_rank, cross_size: Horovod's.
        host: name of this host among those of the job.
        interface: of the network by which ranks reach each other; "" for any.
        store: address, token and round of the rendezvous, as Horovod takes it.
        timeout_s: how long a rank that is silent is waited for.
    """

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
        """What Horovod finds in the environment."""
        return {
            **horovod_numbers({name: getattr(self, name) for name in _NUMBERS}),
            "HOROVOD_HOSTNAME": self.host,
            "HOROVOD_GLOO_IFACE": self.interface or None,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self.store,
            # The port stands in the address, before token and round; what Horovod appends becomes part of the path.
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(self.timeout_s),
        }


@dataclass
class Heartbeat:
    """What a rank says of itself once a second.

    Attributes:
        step: optimizer steps begun.
        idle_s: since its training thread last made progress.
        waiting: whether that waits in a collective.
    """

    step: Callable[[], int] = lambda: 0
    idle_s: Callable[[], float] = lambda: 0.0
    waiting: Callable[[], bool] = lambda: False


class DriverClient:
    """The rank's end. Threads of its own listen to the driver and tell it that the rank lives.

    Args:
        channel: to the driver.
        exit: ends this process where the driver is gone.

    Attributes:
        round: the one this rank is in, or was in last; 0 before the first.
        heartbeat: what it says of itself.
        cut: wakes the training thread where it waits for a rank that is gone.
        change: called, in a thread of the client, when the round is to end.
    """

    def __init__(self, channel: Channel, exit: Callable[[int], Any] = os._exit) -> None:
        self.round = 0
        self.heartbeat = Heartbeat()
        self.wake: Callable[[], object] = lambda: None
        self.on_change: Callable[[], object] = lambda: None
        self._channel = channel
        self._exit = exit
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._changed = False
        self._draining = False
        self._stopping = False
        self._broken = 0
        self._leaving = False
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def start(self) -> DriverClient:
        """Listen, and tell."""
        for run in (self._listen, self._send_heartbeats):
            threading.Thread(target=run, name=f"client {run.__name__}", daemon=True).start()
        return self

    def join(self, why: str, text: str = "", step: int = -1) -> Place:
        """Ask for a place, and wait until there is one.

        Args:
            why: started, failed or changed.
            text: of the error where it failed.
            step: optimizer steps that this process's memory holds; -1 for nothing.

        Errors:
            NoPlace: there is none; as `JobFailed` where the job has failed.
        """
        self._channel.send("join", after=self.round, why=why, text=text[:_MOST_ERROR_CHARACTERS], step=step)
        while True:
            try:
                answer = self._answers.get(timeout=0.2)  # with a timeout, so that signals are heard
            except queue.Empty:
                continue
            if answer["type"] == "end":
                raise (JobFailed if answer.get("failed") is True else NoPlace)(str(answer.get("why", "")))
            place = Place(**{name: answer[name] for name in Place.__dataclass_fields__})
            with self._lock:
                self.round = place.round
            self._draining = False  # the driver knows, and ends the round when enough others are there
            return place

    def is_broken(self) -> bool:
        """Whether a rank of this round is known to be gone."""
        return self._broken == self.round > 0

    def is_changed(self) -> bool:
        """Whether this round is to end."""
        return self._changed

    def notices(self, notices: list[int], changed: int, terminate: int) -> list[int]:
        """The notices of this rank's next step, where a SIGTERM that came to it alone lets it go, not end the run.

        Args:
            notices: how often each came.
            changed: which of them says that the round is to end.
            terminate: which of them SIGTERM has.
        """
        notices = list(notices)
        if notices[terminate] and not self._stopping:
            notices[terminate] = 0
            self._draining = True
            self._channel.send("drain")
        if self._changed or self._draining:
            notices[changed] = 1
        return notices

    def leaving(self, why: str) -> None:
        """Say that this rank has come to its end and will exit."""
        self._leaving = True
        self._channel.send("leaving", why=why)

    def close(self) -> None:
        """Listen no more."""
        self._leaving = True
        self._closed.set()
        self._channel.close()

    def _listen(self) -> None:
        for message in self._channel.messages():
            self._handle(message)
        if not self._leaving:
            self._exit(EXIT_ALONE)

    def _handle(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind in ("round", "end"):
            self._changed = False  # here, in the order of messages: what comes behind it is of the new round
            self._answers.put(dict(message))
        elif kind == "changed":
            self._changed = True
            self.on_change()
        elif kind == "broken":
            with self._lock:
                self._broken = int(message["round"])
                if self._broken == self.round:
                    self.wake()
        elif kind == "stacks":
            sys.stderr.write(f"hvdtrain: where this rank hangs:\n{_main_stack()}")
            sys.stderr.flush()
        elif kind == "stop":
            self._stopping = True
            os.kill(os.getpid(), signal.Signals[str(message["signal"])])

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(BEAT_S):
            heartbeat = self.heartbeat
            self._channel.send(
                "alive",
                round=self.round,
                step=heartbeat.step(),
                idle_s=round(heartbeat.idle_s(), 3),
                waiting=heartbeat.waiting(),
            )


def _main_stack() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def connect_to_driver(environ: Mapping[str, str]) -> DriverClient | None:
    """The client of this process in an elastic job; None where no driver of ours started it."""
    text = environ.get(VARIABLE, "")
    if not text.isdigit():
        return None
    end = socket.socket(fileno=int(text))
    os.set_inheritable(end.fileno(), False)
    channel = Channel(end)
    if hold_lifeline(environ):
        channel.send(HELD)
    return DriverClient(channel).start()
