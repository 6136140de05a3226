"""Find and kill ranks that are alive but make no progress. Slow ranks are left alone.

A rank that computes without progress, such as one that compiles, gets more time; not for ever, as it may be in a loop.
"""

from __future__ import annotations

from hvdtrain.launch.commands import KillWorker
from hvdtrain.launch.cpu_use import EVERY_S
from hvdtrain.launch.faults import lose_host
from hvdtrain.launch.job import Job, Phase, Worker
from hvdtrain.launch.round_changes import break_round

WORKING_TIMES = 10
"""Multiple of the timeout for a rank that computes."""

_WORKED_S = 15.0
"""For how long a rank counts as computing after it was last found to compute. Agents measure every `EVERY_S`."""

_STACKS_S = 0.5
"""Time for a hanging rank to write its stack before it is killed."""


def reset_heartbeats(job: Job) -> None:
    """Restart all heartbeat clocks: the driver itself was suspended and heard nobody."""
    for worker in job.workers.values():
        worker.heard_s = None if worker.heard_s is None else job.now_s
        worker.stopped_s = None if worker.stopped_s is None else job.now_s
    for host in job.hosts.values():
        host.heard_s = job.now_s


def check_hangs(job: Job) -> None:
    """Find ranks and agents that hang, and end them."""
    for host in list(job.hosts.values()):
        if host.agent == "ready" and job.now_s - host.heard_s >= job.limits.lost_s:
            lose_host(job, host, f"no heartbeat for {job.limits.lost_s:.0f} s")
        elif host.agent == "starting" and job.now_s - host.heard_s >= job.limits.agent_s:
            lose_host(job, host, f"its agent was not ready within {job.limits.agent_s:.0f} s: does ssh to it hang?")
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
    """Kill a worker that hangs; the others learn of it by its exit. `after_s`: time to write its stack first."""
    if worker.deadline_s < float("inf"):
        return
    worker.deadline_s = job.now_s + job.limits.end_s  # the kill is repeated if it gets lost
    if after_s:
        job.send(worker, "stacks")
    job.commands.append(KillWorker(worker.number, worker.host, after_s))
    job.log_event("hung", f"{worker.label} hangs ({why}): killed", worker=worker.number, why=why)


def _silence_s(job: Job, worker: Worker) -> float:
    """Return the seconds since a worker's last heartbeat; before the first, since its process was stopped."""
    since_s = worker.stopped_s if worker.heard_s is None else worker.heard_s
    return 0.0 if since_s is None else job.now_s - since_s


def _silent_workers(job: Job) -> list[Worker]:
    """Return workers that are stopped or send no heartbeat; none where all are so: then the job is suspended."""
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
    """Return members without progress while all others wait, in a collective or for the next round, or hang as well."""
    timeout = job.limits.hang_timeout_s
    members = [w for w in job.members() if w.present]
    idle = [w for w in members if not w.joined and w.idle_s > timeout and not _is_computing(job, w, w.idle_s)]
    blocking = [w for w in idle if not w.waiting]
    waiting = [w for w in members if w.joined or w.waiting]
    overdue = job.fault_s is not None and job.now_s - job.fault_s >= timeout
    if not timeout or not (waiting or overdue) or len(waiting) + len(blocking) < len(members):
        return []
    if not blocking and overdue:
        return idle  # they were notified that the round is broken, and have not left it
    return blocking


def _is_computing(job: Job, worker: Worker, idle_s: float) -> bool:
    """Check whether a worker without progress for `idle_s` computes, and is within its time."""
    since_s = job.now_s - idle_s
    seen_since_s = max(since_s + EVERY_S, job.now_s - _WORKED_S)  # CPU time before its last progress does not count
    return worker.busy_s >= seen_since_s and idle_s <= WORKING_TIMES * job.limits.hang_timeout_s


def _break_stuck_round(job: Job) -> None:
    """Break the round when all ranks wait in collectives that never complete; all continue from their current state."""
    timeout = job.limits.hang_timeout_s
    inside = job.in_round()
    if timeout and inside and all(w.waiting and w.idle_s > timeout for w in inside):
        break_round(job, f"all ranks have waited in a collective for more than {timeout:.0f} s")
