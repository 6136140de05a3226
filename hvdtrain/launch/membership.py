"""The membership of a job: a state machine without I/O. Inputs are events and the time; a tick returns `Command`s.

A round is a membership: ranks 0 to size - 1 from one start of Horovod to its end. Tests hold these laws:

1. The loss of a rank is reported to the others at once; the next round waits only for them.
2. A round has `least` to `most` ranks, each in its own slot. Its lowest rank was in the round before.
3. A worker that waits for a place while nobody trains gets one or is dismissed: no wait is endless.
4. A failed slot or host is tried again, for ever, but never at once without a pause.
5. When the job is over, no worker is alive, and the reason is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hvdtrain.launch import faults, job_end, round_changes, worker_starts
from hvdtrain.launch.job import Command, Job, Limits, Phase, Worker

_GAP_S = 5.0  # a longer time between two inputs means that the driver itself was suspended


class Membership:
    """A job. `local`: names of this host; `now_s`: of a monotonic clock, as in all other calls."""

    def __init__(self, limits: Limits, local: frozenset[str], now_s: float) -> None:
        self.job = Job(limits, now_s, began_s=now_s)
        self._local = local

    def hosts_discovered(self, hosts: dict[str, int], now_s: float) -> None:
        """Set the slots by host that may be used from now on."""
        self._apply(now_s, worker_starts.set_hosts, hosts, self._local)

    def agent_ready(self, host: str, now_s: float) -> None:
        """Handle an agent that is ready to start workers."""
        self._begin(now_s)
        known = self.job.hosts.get(host)
        if known is not None and known.agent == "starting":
            known.agent = "ready"
            self.job.log_event("host", host=host)
        self.agent_heartbeat(host, {}, now_s)

    def agent_heartbeat(self, host: str, halted: Mapping[int, bool], now_s: float, busy: Collection[int] = ()) -> None:
        """Handle an agent's heartbeat.

        `halted`: which of its processes are stopped, for example by SIGSTOP; `busy`: workers that compute.
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

    def agent_lost(self, host: str, why: str, now_s: float) -> None:
        """Handle the loss of a host's agent."""
        self._apply(now_s, faults.lose_host, self.job.hosts.get(host), why)

    def worker_dying(self, number: int, now_s: float) -> None:
        """Handle the start of a worker's end in the kernel; `worker_exited` follows with the exit code."""
        self._apply(now_s, faults.mark_dying, self.job.workers.get(number))

    def worker_exited(self, number: int, code: int, now_s: float) -> None:
        """Handle the exit of a worker. `code`: negative for the signal that ended it."""
        self._apply(now_s, faults.handle_exit, self.job.workers.get(number), code)

    def worker_message(self, number: int, message: Mapping[str, Any], now_s: float) -> None:
        """Handle a worker's message."""
        self._begin(now_s)
        worker = self.job.workers.get(number)
        if worker is not None:
            self.job.hosts[worker.host].heard_s = now_s  # its agent forwarded the message
        hear = _SAID.get(str(message.get("type")))
        if worker is not None and hear is not None:
            hear(self.job, worker, message)

    def signal_received(self, name: str, now_s: float) -> None:
        """Handle SIGTERM or SIGINT to the driver."""
        self._apply(now_s, job_end.stop_job, name)

    def tick(self, now_s: float) -> list[Command]:
        """Apply all rules to the current state; return what to do, which follows from all inputs since the last tick.

        `now_s`: not later than the oldest input that was not given yet, or a rank seems silent that is not.
        """
        self._begin(now_s)
        job = self.job
        faults.check_hangs(job)
        worker_starts.forget_old_failures(job)
        faults.check_survivors(job)
        worker_starts.check_shortage(job)
        round_changes.start_next_round(job)
        round_changes.request_change(job)
        for worker in list(job.workers.values()):
            if job.phase is Phase.RUNNING and worker.leave_reason and not worker.round:
                job_end.dismiss(job, worker, worker.leave_reason)
        worker_starts.start_missing(job)
        job_end.end_overdue(job)
        commands, job.commands = job.commands, []
        return commands

    def _apply(self, now_s: float, rule: Callable[..., None], subject: object, *facts: object) -> None:
        """Apply a rule to its subject, unless that is unknown."""
        self._begin(now_s)
        if subject is not None:
            rule(self.job, subject, *facts)

    def _begin(self, now_s: float) -> None:
        away = now_s - self.job.now_s > _GAP_S
        self.job.now_s = max(self.job.now_s, now_s)  # inputs of several threads may be in another order
        if away:
            faults.reset_heartbeats(self.job)


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
            job.failures.append(f"{worker.label}: {text}")
        round_changes.break_round(job, f"{worker.label} has failed: {text}" if text else f"{worker.label} has failed")
    elif inside and not job.changed:
        round_changes.request_leave(job, f"{worker.label} has left the round")


def _alive(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    worker.heard_s = job.now_s
    worker.stopped_s = None
    if message.get("round") == worker.round:
        idle_s = float(_number(message.get("idle_s"), 0))
        worker.idle_s = min(idle_s, job.now_s - worker.entered_s)  # idle time before its round does not count
        worker.waiting = message.get("waiting") is True
        worker.step = max(worker.step, int(_number(message.get("step"), -1)))
        job.trained = job.trained or worker.step > 0


def _drain(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    if worker.leave_reason or job.phase is not Phase.RUNNING:
        return
    if not job.limits.elastic:
        job.log_event("drain", f"{worker.label} received SIGTERM, and the job is not elastic", worker=worker.number)
        return job_end.stop_job(job, "SIGTERM")
    worker.leave_reason, worker.drained = "it received SIGTERM", True
    pause = f"its slot stays empty for {job.limits.cooldown_most_s:.0f} s"
    text = f"{worker.label} received SIGTERM: the others continue, and {pause}"
    job.log_event("drain", text, worker=worker.number)


def _wrong(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    if message.get("round") == job.round and job.phase is Phase.RUNNING:
        named = [w for w in job.members() if w.rank == message.get("rank")]
        for other in named:
            worker_starts.leave_out(job, job.hosts[other.host], f"{other.label} has computed wrong bits")


def _leaving(job: Job, worker: Worker, message: Mapping[str, Any]) -> None:
    job_end.mark_leaving(job, worker, str(message.get("why")))


def _number(value: object, default: int) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


_SAID = {"join": _join, "alive": _alive, "drain": _drain, "wrong": _wrong, "leaving": _leaving}
