"""Ranks that live and do nothing: found by what they say each second, and ended. Slow ones are let alone.

A rank that computes without progress, such as one that compiles, has more time; not for ever, as it may be in a loop.
"""

from __future__ import annotations

from hvdtrain.launch.commands import KillWorker
from hvdtrain.launch.cpu_use import EVERY_S
from hvdtrain.launch.faults import lose_host
from hvdtrain.launch.job import Job, Phase, Worker
from hvdtrain.launch.round_changes import break_round

WORKING_TIMES = 10
"""A rank that computes has the timeout times this."""

_WORKED_S = 15.0
"""A rank that was found to compute this long ago still counts as computing. Agents look every `EVERY_S`."""

_STACKS_S = 0.5
"""For a rank that can speak to say where it hangs, before it is killed."""


def reset_heartbeats(job: Job) -> None:
    """Take everybody as just heard: the driver itself was away, and nobody can be blamed for what it didn't hear."""
    for worker in job.workers.values():
        worker.heard_s = None if worker.heard_s is None else job.now_s
        worker.stopped_s = None if worker.stopped_s is None else job.now_s
    for host in job.hosts.values():
        host.heard_s = job.now_s


def check_hangs(job: Job) -> None:
    """Find who hangs, and end it."""
    for host in list(job.hosts.values()):
        if host.agent == "ready" and job.now_s - host.heard_s >= job.limits.lost_s:
            lose_host(job, host, f"nothing was heard of it for {job.limits.lost_s:.0f} s")
        elif host.agent == "starting" and job.now_s - host.heard_s >= job.limits.agent_s:
            lose_host(job, host, f"its agent was not ready within {job.limits.agent_s:.0f} s: does ssh hang there?")
    if job.phase is Phase.RUNNING:
        for worker in _silent_workers(job):
            kill_hung(job, worker, f"it has been stopped or silent for {_silence_s(job, worker):.0f} s")
        for worker in _blocking_workers(job):
            why = f"it has made no progress for {worker.idle_s:.0f} s, and the others wait for it"
            kill_hung(job, worker, why, _STACKS_S)
        _break_stuck_round(job)
        for worker in list(job.staying()):
            if not worker.joined and not worker.round and job.now_s - worker.started_s >= job.limits.start_timeout_s:
                kill_hung(
                    job, worker, f"it has not asked for a place within {job.limits.start_timeout_s:.0f} s", _STACKS_S
                )


def kill_hung(job: Job, worker: Worker, why: str, after_s: float = 0.0) -> None:
    """End a worker that hangs; its exit is what the others are told of. `after_s`: left to it to say where it is."""
    if worker.deadline_s < float("inf"):
        return
    worker.deadline_s = job.now_s + job.limits.end_s  # the kill is repeated, should it be lost
    if after_s:
        job.send(worker, "stacks")
    job.commands.append(KillWorker(worker.number, worker.host, after_s))
    job.log_event("hung", f"{worker.label} hangs ({why}): it is killed", worker=worker.number, why=why)


def _silence_s(job: Job, worker: Worker) -> float:
    """Seconds since a worker gave a sign of life; before the first, since its process was seen to be stopped."""
    since_s = worker.stopped_s if worker.heard_s is None else worker.heard_s
    return 0.0 if since_s is None else job.now_s - since_s


def _silent_workers(job: Job) -> list[Worker]:
    """Workers whose process is stopped, or that cannot even speak; nobody where all are so: the job is suspended."""
    limits = job.limits
    seen = [w for w in job.staying() if w.heard_s is not None or w.stopped_s is not None]
    known = [w for w in seen if job.hosts[w.host].agent == "ready"]
    heard = [w for w in known if _silence_s(job, w) < limits.silent_s]
    if not heard and len(known) > 1:
        return []
    fresh = [w for w in known if job.now_s - job.hosts[w.host].heard_s < limits.silent_s / 2]
    mute = limits.hang_timeout_s and max(limits.silent_s, limits.hang_timeout_s)
    return [
        w
        for w in fresh
        if (w.stopped_s is not None and len(known) > 1 and _silence_s(job, w) >= limits.silent_s)
        or (mute and heard and _silence_s(job, w) >= mute and not _is_computing(job, w, _silence_s(job, w)))
    ]


def _blocking_workers(job: Job) -> list[Worker]:
    """Members that do nothing while all others wait, in a collective or for the next round, or do nothing either."""
    timeout = job.limits.hang_timeout_s
    members = [w for w in job.members() if w.present]
    idle = [w for w in members if not w.joined and w.idle_s > timeout and not _is_computing(job, w, w.idle_s)]
    blocking = [w for w in idle if not w.waiting]
    waiting = [w for w in members if w.joined or w.waiting]
    overdue = job.fault_s is not None and job.now_s - job.fault_s >= timeout
    if not timeout or not (waiting or overdue) or len(waiting) + len(blocking) < len(members):
        return []
    if not blocking and overdue:
        return idle  # they were told that the round is broken, and stay in it
    return blocking


def _is_computing(job: Job, worker: Worker, idle_s: float) -> bool:
    """Whether one that has made no progress for so long computes, and may."""
    since_s = job.now_s - idle_s
    seen_since_s = max(since_s + EVERY_S, job.now_s - _WORKED_S)  # not what it computed before it stood still
    return worker.busy_s >= seen_since_s and idle_s <= WORKING_TIMES * job.limits.hang_timeout_s


def _break_stuck_round(job: Job) -> None:
    """All wait in collectives that never come: the round is given up, and everyone goes on from where it is."""
    timeout = job.limits.hang_timeout_s
    inside = job.in_round()
    if timeout and inside and all(w.waiting and w.idle_s > timeout for w in inside):
        break_round(job, f"all wait in a collective for more than {timeout:.0f} s")
