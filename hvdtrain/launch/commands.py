"""What the membership of a job asks for: the driver carries it out. And the limits that it holds to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of a host."""

    host: str


@dataclass(frozen=True)
class StopAgent:
    """Let go of a host's agent: it ends what it started, then itself."""

    host: str


@dataclass(frozen=True)
class StartWorker:
    """Start a rank's process. `place`: a guess of its place, for what reads it before the first round."""

    worker: int
    host: str
    place: dict[str, int]


@dataclass(frozen=True)
class KillWorker:
    """End a process and all that it started: at once, or after so many seconds."""

    worker: int
    host: str
    after_s: float = 0.0


@dataclass(frozen=True)
class SendMessage:
    """Send a message of `hvdtrain.runtime.channel` to a worker."""

    worker: int
    host: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenRound:
    """Open the store of a round. `keys`: what it holds from the start. Those of rounds before are dropped."""

    round: int
    keys: dict[str, str]


@dataclass(frozen=True)
class CloseRound:
    """The round is broken: who still asks its store is refused."""

    round: int


@dataclass(frozen=True)
class Event:
    """Something to be written down; with a `text`, to be said to the user as well."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class End:
    """The job is over, and no worker lives."""

    code: int


Command = StartAgent | StopAgent | StartWorker | KillWorker | SendMessage | OpenRound | CloseRound | Event | End


@dataclass(frozen=True)
class Limits:
    """What a job holds to; times in seconds.

    Attributes:
        start: ranks that the first round waits for.
        least: ranks without which there is no round.
        most: ranks that are never exceeded.
        elastic: whether the job goes on with others when a rank is gone. If not, that ends it.
        restarts: how often all is started again after no rank was left.
        reset_limit: rounds after the first; None for any number.
        hang_timeout_s: a rank that holds the others up for so long is ended, one that computes later; 0 for never.
        elastic_timeout_s: how long fewer ranks than `least` are waited with.
        start_timeout_s: how long `start` ranks are waited for, then `least` will do.
        gloo_timeout_s: after which a rank that does not answer is given up by the others; 0 for `gloo_timeout`'s.
        debounce_s: without a further change of membership before ranks are told of it.
        debounce_most_s: after the first change, however many follow.
        cooldown_s: before a slot or host that failed is tried again; doubled with each failure.
        cooldown_most_s: never longer than this.
        forgive_after_s: in rounds after which a slot's failures are forgotten.
        silent_s: without a sign of life, which comes each second.
        lost_s: without a sign of an agent, after which its host is lost.
        agent_s: for an agent that was started until it can be told something.
        grace_s: for the others when the first rank has finished.
        stop_s: for ranks that were told to stop.
        leave_s: for ranks that have said that they leave, and may still write.
        end_s: for ranks that were told that there is no place.
        fruitless: rounds in a row without one optimizer step, after which the job ends.
    """

    start: int
    least: int
    most: int
    elastic: bool = True
    restarts: int = 0
    reset_limit: int | None = None
    hang_timeout_s: float = 60.0
    elastic_timeout_s: float = 600.0
    start_timeout_s: float = 600.0
    gloo_timeout_s: int = 0
    debounce_s: float = 1.0
    debounce_most_s: float = 5.0
    cooldown_s: float = 1.0
    cooldown_most_s: float = 60.0
    forgive_after_s: float = 30.0
    silent_s: float = 5.0
    lost_s: float = 10.0
    agent_s: float = 120.0
    grace_s: float = 30.0
    stop_s: float = 60.0
    leave_s: float = 600.0
    end_s: float = 10.0
    fruitless: int = 10

    def gloo_timeout(self, size: int) -> int:
        """Of a round of so many ranks: all connect to all, and the last is done later the more they are."""
        return self.gloo_timeout_s or max(10, size // 8)
