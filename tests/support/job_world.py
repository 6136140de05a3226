"""A world for `Membership` that needs no process and no clock: agents and workers that do as they are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.launch import job
from hvdtrain.launch.membership import Membership


@dataclass
class FakeWorker:
    """`told`: kinds of messages, in order. `deaf`: it does not do as it is told. `dying`: ending, but still there.

    `leaves`: whether the newest message about changing ranks asked it to leave.
    """

    number: int
    host: str
    alive: bool = True
    round: int = 0
    rank: int = -1
    size: int = 0
    place: dict[str, Any] = field(default_factory=dict)
    inside: bool = False
    told: list[str] = field(default_factory=list)
    leaves: bool = False
    deaf: bool = False
    dying: bool = False
    step: int = -1


class World:
    """Carries out what a membership asks for; `broken` and `changed` make a worker join, `end` makes it exit."""

    def __init__(self, limits: job.Limits, hosts: dict[str, int], *, joining: bool = True) -> None:
        self.now_s = 1000.0
        self._todo: list[job.Command] = []
        self._doing = False
        self.joining = joining
        self.unreachable: set[str] = set()
        self.workers: dict[int, FakeWorker] = {}
        self.agents: set[str] = set()
        self.rounds: list[list[int]] = []
        self.said: list[str] = []
        self.events: list[job.Event] = []
        self.code: int | None = None
        self.members = Membership(limits, frozenset({"a"}), self.now_s)
        self.hosts(hosts)

    def hosts(self, hosts: dict[str, int]) -> None:
        self.members.hosts_discovered(hosts, self.now_s)
        self.tick(0)

    def tick(self, seconds: float = 0.1) -> None:
        self.now_s += seconds
        self.do(self.members.tick(self.now_s))

    def wait(self, seconds: float) -> None:
        """Time goes by, with a sign of life of everyone who can give one each second."""
        until = self.now_s + seconds
        while self.now_s < until and self.code is None:
            self.tick(min(0.5, until - self.now_s))
            for host in list(self.agents - self.unreachable):
                self.members.agent_heartbeat(host, {}, self.now_s)
            for worker in self.living():
                if not (worker.deaf or worker.dying or worker.host in self.unreachable):
                    self.alive(worker)

    def alive(self, worker: FakeWorker, idle_s: float = 0.0, waiting: bool = False) -> None:
        """Its sign of life."""
        self.say(worker, "alive", round=worker.round, step=worker.step, idle_s=idle_s, waiting=waiting)
        self.tick(0)

    def join(self, worker: FakeWorker, why: str = "started", text: str = "") -> None:
        worker.inside = False
        self.say(worker, "join", after=worker.round, why=why, text=text, step=worker.step)

    def say(self, worker: FakeWorker, kind: str, **facts: Any) -> None:
        self.members.worker_message(worker.number, {"type": kind, **facts}, self.now_s)
        self.tick(0)

    def die(self, worker: FakeWorker) -> None:
        """The kernel begins to end it."""
        worker.dying, worker.inside = True, False
        self.members.worker_dying(worker.number, self.now_s)
        self.tick(0)

    def exit(self, worker: FakeWorker, code: int = -9) -> None:
        worker.alive = worker.inside = False
        self.members.worker_exited(worker.number, code, self.now_s)
        self.tick(0)

    def cut(self, host: str) -> None:
        """The agent of a host is gone, with its workers."""
        self._stop_agent(host)
        self.members.agent_lost(host, "the link is cut", self.now_s)
        self.tick(0)

    def finish(self, worker: FakeWorker, why: str = "finished", code: int = 0) -> None:
        self.say(worker, "leaving", why=why)
        if worker.alive:
            self.exit(worker, code)

    def living(self, host: str | None = None) -> list[FakeWorker]:
        return [w for w in self.workers.values() if w.alive and host in (None, w.host)]

    def round(self) -> list[FakeWorker]:
        """Who is in the round now, by rank."""
        return sorted((w for w in self.living() if w.inside), key=lambda w: w.rank)

    def by_rank(self, rank: int) -> FakeWorker:
        return next(w for w in self.round() if w.rank == rank)

    def do(self, asked: list[job.Command]) -> None:
        """Carry out commands in their order; what follows from them is seen after all of them."""
        self._todo += asked
        while self._todo and not self._doing:
            self._doing = True
            todo, self._todo = self._todo, []
            self._carry_out(todo)
            self._doing = False

    def _carry_out(self, asked: list[job.Command]) -> None:
        for command in asked:
            match command:
                case job.StartAgent(host):
                    self._start_agent(host)
                case job.StopAgent(host):
                    self._stop_agent(host)
                case job.StartWorker():
                    assert command.host in self.agents, "no agent there"
                    worker = FakeWorker(command.worker, command.host, place=command.place)
                    self.workers[command.worker] = worker
                    if self.joining:
                        self.join(worker)
                case job.KillWorker(number) if self.workers[number].alive:
                    self.exit(self.workers[number], -9)
                case job.OpenRound():
                    self.rounds += [[]] if command.round else []
                case job.SendMessage():
                    self._tell(self.workers[command.worker], command)
                case job.Event():
                    self.events.append(command)
                    self.said += filter(None, [command.text])
                case job.End(code):
                    assert self.code is None, "the end came twice"
                    self.code = code

    def _start_agent(self, host: str) -> None:
        if host in self.unreachable:
            self.members.agent_lost(host, "Connection refused", self.now_s)
        else:
            self.agents.add(host)
            self.members.agent_ready(host, self.now_s)
        self.tick(0)

    def _stop_agent(self, host: str) -> None:
        self.agents.discard(host)
        for worker in self.living(host):
            worker.alive = worker.inside = False

    def _tell(self, worker: FakeWorker, command: job.SendMessage) -> None:
        if not worker.alive or worker.dying:
            return
        worker.told.append(command.kind)
        if command.kind == "changed":
            worker.leaves = command.facts["leaves"]
        if command.kind == "round":
            assert not worker.inside, "it is in a round already"
            worker.round, worker.rank, worker.size = (command.facts[k] for k in ("round", "rank", "size"))
            worker.place, worker.inside, worker.step = command.facts, True, max(worker.step, 0)
            self.rounds[-1].append(worker.number)
        elif worker.deaf:
            return
        elif command.kind == "end":
            self.exit(worker, 0)
        elif command.kind in ("broken", "changed") and worker.inside:
            self.join(worker, "failed" if command.kind == "broken" else "changed")
        elif command.kind == "stop" and worker.inside:
            self.finish(worker, command.facts["signal"], {"SIGTERM": 143, "SIGINT": 130}[command.facts["signal"]])
