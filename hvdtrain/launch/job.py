"""The records of a job: its hosts, their slots, its workers. Changed by the rules beside it, which do no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hvdtrain.launch.commands import Command, Event, Limits, SendMessage

NEVER = float("-inf")


class Phase(Enum):
    """How far a job is.

    RUNNING: ranks come, go and train. FINISHING: the first rank has finished. STOPPING: all were told to save and end.
    ENDING: it failed, and what lives is ended. OVER: no worker lives.
    """

    RUNNING = auto()
    FINISHING = auto()
    STOPPING = auto()
    ENDING = auto()
    OVER = auto()


@dataclass
class Slot:
    """A place for a worker on a host. Not used before `free_s`; `failed`: since all was started last."""

    failures: int = 0
    free_s: float = NEVER
    failed: bool = False


@dataclass
class Host:
    """A host that was ever named. `slots`: how many it may use, 0 since it was taken away.

    `agent`: "" none, "starting", or "ready"; not started before `free_s`; `heard_s`: its last sign.
    """

    name: str
    local: bool
    slots: int = 0
    agent: str = ""
    failures: int = 0
    free_s: float = NEVER
    failed: bool = False
    heard_s: float = NEVER
    slots_by_index: dict[int, Slot] = field(default_factory=dict)

    def slot_at(self, index: int) -> Slot:
        """The slot of a number."""
        return self.slots_by_index.setdefault(index, Slot())


@dataclass(eq=False)
class Worker:
    """A process that lives.

    Attributes:
        number: of its own in the job.
        round: that it is or was in last; 0 for none yet.
        rank: in that round, -1 for none yet.
        joined: it waits for a place in the next round.
        step: optimizer steps that it holds, as it said last.
        going: why it has to make room, "" if it stays.
        drained: it was told to by SIGTERM, so that its slot is left alone for a while.
        leaving: why it said that it ends, "" if it didn't.
        dying: its process is on its end, whatever of it is still to be seen.
        ended: why it was told to end, "" if it wasn't; gone by `until_s`, else it is killed.
        heard_s: when it gave a sign of life last, None before the first.
        idle_s, waiting: as it said then.
        stopped_s: since when its process is stopped, as by SIGSTOP; None while it is not.
        busy_s: when it was found to compute last, whatever it says.
        entered_s: when its round began.
        first_round: seniority.
    """

    number: int
    host: str
    slot: int
    started_s: float
    round: int = 0
    rank: int = -1
    joined: bool = False
    step: int = -1
    leave_reason: str = ""
    drained: bool = False
    leaving: str = ""
    dying: bool = False
    dismissed: str = ""
    deadline_s: float = float("inf")
    heard_s: float | None = None
    idle_s: float = 0.0
    waiting: bool = False
    stopped_s: float | None = None
    busy_s: float = NEVER
    entered_s: float = NEVER
    first_round: int = 0

    @property
    def can_stay(self) -> bool:
        """Whether it may be in the next round."""
        return not self.leave_reason and self.present

    @property
    def present(self) -> bool:
        """Whether it has not begun to end, nor was told to."""
        return not (self.leaving or self.dying or self.dismissed)

    @property
    def label(self) -> str:
        """What it is called in messages."""
        return f"rank {self.rank} on {self.host}" if self.rank >= 0 else f"the process of {self.host}:{self.slot}"


@dataclass
class Job:
    """All that is known. `out` collects what is asked for; `now_s` is the time of the input at hand."""

    limits: Limits
    now_s: float = 0.0
    phase: Phase = Phase.RUNNING
    hosts: dict[str, Host] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    workers_started: int = 0
    round: int = 0
    is_fresh: bool = True
    """No round since it was started, or started again: nobody holds a state."""
    broken: bool = False
    changed: bool = False
    rounds: int = 0
    restarts: int = 0
    fruitless_rounds: int = 0
    began_step: int = -1
    began_s: float = 0.0
    """When it was started, or started again."""
    fault_s: float | None = None
    joined_s: float = NEVER
    wish: frozenset[int] = frozenset()
    wish_s: float = 0.0
    wished_s: float = 0.0
    short_s: float | None = None
    code: int = 0
    deadline_s: float = float("inf")
    size: int = 0
    trained: bool = False
    """A rank has told of a step: there may be a checkpoint."""
    spoiled: str = ""
    last_code: int = 0
    """What the rank that failed last exited with."""
    failures: list[str] = field(default_factory=list)
    """The last ones, for the message that ends the job."""

    def remember_failure(self, failure: str) -> None:
        """Keep a failure for the message that ends the job."""
        self.failures = [*self.failures[-9:], failure]

    def members(self) -> list[Worker]:
        """Workers that live and were in the last round, whether they have joined anew or not."""
        return [w for w in self.workers.values() if self.is_member(w)]

    def in_round(self) -> list[Worker]:
        """Members that have not left the round, as far as is known."""
        return [w for w in self.workers.values() if self.is_in_round(w)]

    def staying(self) -> list[Worker]:
        """Workers that may be in the next round."""
        return [w for w in self.workers.values() if w.can_stay]

    def is_member(self, worker: Worker) -> bool:
        """Whether one that lives is among `members`."""
        return worker.round == self.round > 0

    def is_in_round(self, worker: Worker) -> bool:
        """Whether one that lives is `inside`."""
        return worker.round == self.round > 0 and not worker.joined and worker.present

    def send(self, worker: Worker, kind: str, **facts: Any) -> None:
        """Send a message."""
        self.commands.append(SendMessage(worker.number, worker.host, kind, facts))

    def log_event(self, name: str, text: str = "", **facts: Any) -> None:
        """Write down what happened, and say it if there is a text."""
        self.commands.append(Event(name, facts, text))

    def step(self) -> int:
        """The newest step that a living worker holds."""
        return max((w.step for w in self.workers.values()), default=-1)
