"""The state of a job (hosts, slots, workers), its limits, and its commands to the driver. No I/O.

The rules in the modules next to this one change it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

NEVER = float("-inf")


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


class Phase(Enum):
    """Phase of a job."""

    RUNNING = auto()  # ranks join, leave and train
    FINISHING = auto()  # the first rank has finished
    STOPPING = auto()  # all ranks save and end
    ENDING = auto()  # the job has failed, and its workers are ended
    OVER = auto()  # no worker is alive


@dataclass
class Slot:
    """A place for a worker on a host. Not used before `free_s`; `failed`: since the last start of the whole job."""

    failures: int = 0
    free_s: float = NEVER
    failed: bool = False


@dataclass
class Host:
    """A host that was named at some time."""

    name: str
    local: bool
    slots: int = 0  # 0 once it must be vacated
    agent: str = ""  # "" none, "starting", or "ready"
    failures: int = 0
    free_s: float = NEVER  # its agent is not started before
    failed: bool = False
    left_out: bool = False  # for the rest of the job, because it has computed wrong bits
    heard_s: float = NEVER  # its last heartbeat
    slots_by_index: dict[int, Slot] = field(default_factory=dict)

    def slot_at(self, index: int) -> Slot:
        """Return the slot with this index."""
        return self.slots_by_index.setdefault(index, Slot())


@dataclass(eq=False)
class Worker:
    """A living process."""

    number: int  # unique in the job
    host: str
    slot: int
    started_s: float
    round: int = 0  # its current or last round; 0 for none yet
    rank: int = -1  # in that round, -1 for none yet
    joined: bool = False  # it waits for a place in the next round
    step: int = -1  # optimizer steps in its memory, as last reported
    leave_reason: str = ""  # why it must make room, "" if it may stay
    drained: bool = False  # it received SIGTERM, so its slot gets a cooldown
    leaving: str = ""  # why it reported that it ends, "" if it did not
    dying: bool = False  # its process is ending, though it may still be visible
    dismissed: str = ""  # why it was dismissed, "" if it was not
    deadline_s: float = float("inf")  # it is killed if it is alive then
    heard_s: float | None = None  # time of its last heartbeat, None before the first
    idle_s: float = 0.0  # from that heartbeat
    waiting: bool = False  # from that heartbeat
    stopped_s: float | None = None  # since when its process is stopped, for example by SIGSTOP; None if it runs
    busy_s: float = NEVER  # when it was last found to work
    entered_s: float = NEVER  # when its round began

    @property
    def can_stay(self) -> bool:
        """Whether it may be in the next round."""
        return not self.leave_reason and self.present

    @property
    def present(self) -> bool:
        """Whether it neither ends nor was dismissed."""
        return not (self.leaving or self.dying or self.dismissed)

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"rank {self.rank} on {self.host}" if self.rank >= 0 else f"the process of {self.host}:{self.slot}"


@dataclass
class Job:
    """All state of a job. `commands` collects the output; `now_s` is the time of the current input."""

    limits: Limits
    now_s: float = 0.0
    phase: Phase = Phase.RUNNING
    hosts: dict[str, Host] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    workers_started: int = 0
    round: int = 0
    is_fresh: bool = True  # no round since the start or restart: no worker holds a state
    broken: bool = False
    changed: bool = False
    restarts: int = 0
    fruitless_rounds: int = 0
    began_step: int = -1
    began_s: float = 0.0  # time of the start or restart
    fault_s: float | None = None
    joined_s: float = NEVER
    wish: frozenset[int] = frozenset()
    wish_s: float = 0.0
    wished_s: float = 0.0
    short_s: float | None = None
    code: int = 0
    deadline_s: float = float("inf")
    size: int = 0
    trained: bool = False  # a rank has reported a step: there may be a checkpoint
    spoiled: str = ""
    last_code: int = 0  # exit code of the last failed rank
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=5))  # for the message that ends the job

    def members(self) -> list[Worker]:
        """Return living workers of the last round, whether they have joined again or not."""
        return [w for w in self.workers.values() if self.is_member(w)]

    def in_round(self) -> list[Worker]:
        """Return members that have not left the round, as far as is known."""
        return [w for w in self.workers.values() if self.is_in_round(w)]

    def staying(self) -> list[Worker]:
        """Return workers that may be in the next round."""
        return [w for w in self.workers.values() if w.can_stay]

    def is_member(self, worker: Worker) -> bool:
        """Check whether a living worker is among `members`."""
        return worker.round == self.round > 0

    def is_in_round(self, worker: Worker) -> bool:
        """Check whether a living worker is among `in_round`."""
        return worker.round == self.round > 0 and not worker.joined and worker.present

    def send(self, worker: Worker, kind: str, **facts: Any) -> None:
        """Send a message to a worker."""
        self.commands.append(SendMessage(worker.number, worker.host, kind, facts))

    def log_event(self, name: str, text: str = "", **facts: Any) -> None:
        """Log an event, and show it to the user if it has a text."""
        self.commands.append(Event(name, facts, text))
