"""Commands that the membership of a job gives to the driver, and the limits of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of a host."""

    host: str


@dataclass(frozen=True)
class StopAgent:
    """Close the link to a host's agent, which ends its workers and itself."""

    host: str


@dataclass(frozen=True)
class StartWorker:
    """Start a rank's process. `place`: an estimate of its place, for code that reads it before the first round."""

    worker: int
    host: str
    place: dict[str, int]


@dataclass(frozen=True)
class KillWorker:
    """Kill a process and all that it started, after `after_s` seconds."""

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
    """Open the store of a round with `keys`; refuse requests for earlier rounds. Round 0: only close the store."""

    round: int
    keys: dict[str, str]


@dataclass(frozen=True)
class Event:
    """An event for the log; with a `text`, also shown to the user."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class End:
    """The job is over, and no worker is alive."""

    code: int


Command = StartAgent | StopAgent | StartWorker | KillWorker | SendMessage | OpenRound | Event | End


@dataclass(frozen=True)
class Limits:
    """Limits of a job; times in seconds."""

    start: int  # ranks that the first round waits for
    least: int  # fewest ranks of a round
    most: int  # most ranks of a round
    elastic: bool = True  # whether the job continues when a rank is lost; otherwise the loss ends it
    restarts: int = 0  # as the option of ``hvdtrain launch``
    reset_limit: int | None = None  # as the option; None for no limit
    hang_timeout_s: float = 60.0  # a rank that blocks the others this long is killed, later if it computes; 0 for never
    elastic_timeout_s: float = 600.0  # how long to wait with fewer ranks than `least`
    start_timeout_s: float = 600.0  # how long to wait for `start` ranks; `least` are enough afterwards
    gloo_timeout_s: int = 0  # after which a rank that does not answer is lost to the others; 0 for `gloo_timeout`
    debounce_s: float = 1.0  # pause after a change of membership before ranks are notified, for further changes
    debounce_most_s: float = 5.0  # longest such pause, however many changes follow
    cooldown_s: float = 1.0  # pause before a failed slot or host is tried again; doubles with each failure
    cooldown_most_s: float = 60.0  # longest such pause
    forgive_after_s: float = 30.0  # time in rounds after which a slot's failures are forgotten
    silent_s: float = 5.0  # time without a heartbeat of a rank, which comes each second
    lost_s: float = 10.0  # time without a heartbeat of an agent after which its host is lost
    agent_s: float = 120.0  # time for a started agent to become ready
    grace_s: float = 30.0  # time for the other ranks after the first has finished; infinity: as long as they need
    stop_s: float = 60.0  # time for ranks to save and end, after a stop signal or because there is no place for them
    leave_s: float = 600.0  # time for ranks that have reported that they leave and may still write
    end_s: float = 10.0  # time for dismissed ranks to exit
    fruitless: int = 10  # rounds in a row without an optimizer step after which the job fails

    def gloo_timeout(self, size: int) -> int:
        """Return Gloo's timeout for a round of `size` ranks: all connect to all, so more ranks need more time."""
        return self.gloo_timeout_s or max(10, size // 8)
