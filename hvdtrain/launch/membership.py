"""Who is in the job: a state machine without I/O. Inputs are what was seen and the time; outputs are `Command`s.

A round is a membership: ranks 0 to size - 1 from one start of Horovod to its end. The laws, which tests hold:

1. A rank that is gone is told to the others at once; the next round waits for nobody but them.
2. A round has at least `least` and at most `most` ranks, each from a slot of its own; the lowest rank is of one who was
   in the round before.
3. Who waits for a place while nobody trains gets one or is told that there is none: no wait has no end.
4. Nothing that failed is given up for ever; nothing is tried again at once for ever.
5. When the job is over, no worker lives, and it is said why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hvdtrain.launch import faults, hangs, job_end, round_changes, shortage, worker_starts
from hvdtrain.launch.commands import Command, Limits
from hvdtrain.launch.job import Job, Phase, Worker

_GAP_S = 5.0
"""A longer time between two inputs: the driver itself was stopped."""


class Membership:
    """One job.

    Args:
        limits: what it holds to.
        local: names of the hosts that are this one.
        now_s: of a clock that only goes forward, as in all other calls.
    """

    def __init__(self, limits: Limits, local: frozenset[str], now_s: float) -> None:
        self.job = Job(limits, now_s, began_s=now_s)
        self._local = local

    def hosts_discovered(self, hosts: dict[str, int], now_s: float) -> list[Command]:
        """Slots by host that may be used from now on."""
        self._begin(now_s)
        worker_starts.set_hosts(self.job, hosts, self._local)
        return self._advance()

    def agent_ready(self, host: str, now_s: float) -> list[Command]:
        """The agent of a host can be told to start workers."""
        self._begin(now_s)
        known = self.job.hosts.get(host)
        if known is not None and known.agent == "starting":
            known.agent = "ready"
            self.job.log_event("host", host=host)
        self.agent_heartbeat(host, {}, now_s)
        return self._advance()

    def agent_heartbeat(self, host: str, halted: Mapping[int, bool], now_s: float, busy: Collection[int] = ()) -> None:
        """An agent gave a sign of life.

        `halted`: which of its processes are stopped, as by SIGSTOP; `busy`: workers that were found to compute.
        What follows from it is found at the next tick.
        """
        self._begin(now_s)
        if host in self.job.hosts:
            self.job.hosts[host].heard_s = now_s
        for number, is_halted in halted.items():
            worker = self.job.workers.get(number)
            if worker is not None:
                worker.stopped_s = (worker.stopped_s or now_s) if is_halted else None
        for number in busy:
            if number in self.job.workers:
                self.job.workers[number].busy_s = now_s

    def agent_lost(self, host: str, why: str, now_s: float) -> list[Command]:
        """The agent of a host is gone."""
        self._begin(now_s)
        if host in self.job.hosts:
            faults.lose_host(self.job, self.job.hosts[host], why)
        return self._advance()

    def worker_dying(self, number: int, now_s: float) -> list[Command]:
        """The kernel has begun to end a worker's process; how it ended is told when that is done."""
        self._begin(now_s)
        worker = self.job.workers.get(number)
        if worker is not None:
            faults.mark_dying(self.job, worker)
        return self._advance()

    def worker_exited(self, number: int, code: int, now_s: float) -> list[Command]:
        """A worker's process is gone. `code`: negative for the signal that ended it."""
        self._begin(now_s)
        worker = self.job.workers.get(number)
        if worker is not None:
            faults.handle_exit(self.job, worker, code)
        return self._advance()

    def worker_message(self, number: int, message: Mapping[str, Any], now_s: float) -> list[Command]:
        """A worker said something by its channel. What follows from a sign of life is found at the next tick."""
        self._begin(now_s)
        worker = self.job.workers.get(number)
        if worker is not None:
            self.job.hosts[worker.host].heard_s = now_s  # its agent has handed it on
        hear = _SAID.get(str(message.get("type")))
        if worker is not None and hear is not None:
            hear(self.job, worker, message)
        return [] if hear is _alive else self._advance()

    def signal_received(self, name: str, now_s: float) -> list[Command]:
        """The driver was told to end by SIGTERM or SIGINT."""
        self._begin(now_s)
        job_end.stop_job(self.job, name)
        return self._advance()

    def tick(self, now_s: float) -> list[Command]:
        """Time goes by."""
        self._begin(now_s)
        return self._advance()

    def _begin(self, now_s: float) -> None:
        away = now_s - self.job.now_s > _GAP_S
        self.job.now_s = now_s
        if away:
            hangs.reset_heartbeats(self.job)

    def _advance(self) -> list[Command]:
        """Do all that follows from what is known now."""
        job = self.job
        hangs.check_hangs(job)
        worker_starts.forget_old_failures(job)
        faults.check_survivors(job)
        shortage.check_shortage(job)
        round_changes.start_next_round(job)
        round_changes.request_change(job)
        for worker in list(job.workers.values()):
            if job.phase is Phase.RUNNING and worker.leave_reason and not worker.round:
                job_end.dismiss(job, worker, worker.leave_reason)
        worker_starts.start_missing(job)
        job_end.end_overdue(job)
        commands, job.commands = job.commands, []
        return commands


def _join(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    inside = job.is_in_round(worker)
    worker.step = _number(message.get("step"), -1)
    job.trained = job.trained or worker.step > 0
    worker.idle_s, worker.waiting = 0.0, False
    worker.joined, job.joined_s = True, job.now_s
    why, text = str(message.get("why")), str(message.get("text", ""))
    job.log_event("join", worker=worker.number, why=why, step=worker.step, after=message.get("after"), error=text)
    if worker.dismissed or worker.leaving:
        job_end.send_end(job, worker)
    elif inside and why == "failed":
        if text and not job.broken:
            job.remember_failure(f"{worker.label}: {text}")
        round_changes.break_round(job, f"{worker.label} has failed: {text}" if text else f"{worker.label} has failed")
    elif inside and not job.changed:
        round_changes.request_leave(job, f"{worker.label} has left the round")


def _alive(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    worker.heard_s = job.now_s
    worker.stopped_s = None
    if message.get("round") == worker.round:
        idle_s = float(_number(message.get("idle_s"), 0))
        worker.idle_s = min(idle_s, job.now_s - worker.entered_s)  # what was before its round says nothing
        worker.waiting = message.get("waiting") is True
        worker.step = max(worker.step, int(_number(message.get("step"), -1)))
        job.trained = job.trained or worker.step > 0


def _drain(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    if worker.leave_reason or job.phase is not Phase.RUNNING:
        return
    if not job.limits.elastic:
        job.log_event("drain", f"{worker.label} was told to go, and the job is not elastic", worker=worker.number)
        return job_end.stop_job(job, "SIGTERM")
    worker.leave_reason, worker.drained = "it was told to go", True
    text = f"{worker.label} was told to go: the others go on, and its slot rests for {job.limits.cooldown_most_s:.0f} s"
    job.log_event("drain", text, worker=worker.number)


def _leaving(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    job_end.mark_leaving(job, worker, str(message.get("why")))


def _number(value: object, default: int) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


_SAID = {"join": _join, "alive": _alive, "drain": _drain, "leaving": _leaving}
