"""Lost workers and agents, and their consequences; workers that hang, which are killed. Slow ones are left alone.

A rank that compiles or waits for a file system makes no progress, and gets more time, but not for ever: it may loop.
"""

from __future__ import annotations

from hvdtrain.errors import USAGE
from hvdtrain.launch.job import Host, Job, KillWorker, Phase, StopAgent, Worker
from hvdtrain.launch.job_end import describe_exit, fail, finish_leaving, restart_or_fail
from hvdtrain.launch.round_changes import break_round
from hvdtrain.launch.worker_process import EVERY_S
from hvdtrain.launch.worker_starts import start_cooldown

WORKING_TIMES = 10
"""Multiple of the timeout for a rank that works."""

_WORKED_S = 15.0
"""For how long a rank counts as working after it was last found to work. Agents measure every `EVERY_S`."""

_STACKS_S = 0.5  # time for a hanging rank to write its stack before it is killed


def mark_dying(job: Job, worker: Worker) -> None:
    """Take a worker with an ending process out of its round; its slot stays occupied until it has exited."""
    inside = job.is_in_round(worker)
    worker.dying = True
    worker.deadline_s = min(worker.deadline_s, job.now_s + job.limits.end_s)  # a process that cannot end is reported
    if inside:
        job.log_event("dying", f"{worker.label} is dead", worker=worker.number)
        break_round(job, f"{worker.label} is dead")


def handle_exit(job: Job, worker: Worker, code: int, text: str = "") -> None:
    """Handle the exit of a worker. `text`: the reason, where the exit code does not show it."""
    said = text or describe_exit(code)
    member = job.is_member(worker) and not job.is_fresh
    inside = job.is_in_round(worker)
    del job.workers[worker.number]
    job.log_event("exited", worker=worker.number, host=worker.host, code=code, member=member, why=worker.dismissed)
    if inside:
        break_round(job, f"{worker.label} {said}")
    others_joined = any(w.joined for w in job.workers.values())
    if worker.leaving:
        finish_leaving(job, worker, code)
    elif worker.dismissed:
        if worker.drained:
            job.hosts[worker.host].slot_at(worker.slot).free_s = job.now_s + job.limits.cooldown_most_s
    elif job.phase is Phase.RUNNING and code == 0 and not worker.joined and not job.round and not others_joined:
        job.phase = Phase.FINISHING  # its program does not train, such as ``--help``
        job.deadline_s = job.now_s + job.limits.grace_s
    else:
        _failed(job, worker, code, said)


def _failed(job: Job, worker: Worker, code: int, said: str) -> None:
    place = job.hosts[worker.host].slot_at(worker.slot)
    seconds = start_cooldown(job, place)
    text = f"{worker.label} {said}"
    job.failures.append(text)
    final = code == USAGE and (job.is_fresh or not any(w.step > 0 for w in (worker, *job.members())))
    again = job.limits.elastic and not final and _can_continue(job)
    again = again and (job.is_fresh or any(w.present for w in job.members()))
    job.log_event("fault", f"{text}; it will be started again in {seconds:.0f} s" if again else text)
    if job.phase is not Phase.RUNNING:
        if job.phase is Phase.FINISHING and (worker.rank == 0 or not job.limits.elastic):
            job.spoiled = text
        return
    job.last_code = code
    if final:  # a restart would fail in the same way, and no rank has done a step
        fail(job, text, USAGE)
    elif not job.limits.elastic:
        restart_or_fail(job, text)


def lose_host(job: Job, host: Host, why: str) -> None:
    """Handle the loss of a host's agent, and of all workers that it started."""
    if not host.agent:
        return
    host.agent = ""
    job.commands.append(StopAgent(host.name))
    seconds = start_cooldown(job, host)
    text = f"{host.name} is lost: {why}"
    job.failures.append(text)
    again = job.limits.elastic and _can_continue(job, without=host)
    job.log_event("host_lost", f"{text}; it will be tried again in {seconds:.0f} s" if again else text, host=host.name)
    for worker in [w for w in job.workers.values() if w.host == host.name]:
        handle_exit(job, worker, 1, "is lost with its host")
    if not job.limits.elastic and job.phase is Phase.RUNNING:
        restart_or_fail(job, text)


def check_survivors(job: Job) -> None:
    """Restart or end the job when no rank with the state is left, or none has ever joined."""
    if job.phase is Phase.RUNNING and not _can_continue(job):
        restart_or_fail(job, "no process got as far as joining" if job.is_fresh else "no rank is left")


def _can_continue(job: Job, without: Host | None = None) -> bool:
    """Check whether a rank with the state is left, or one may still join the first round. `without`: a lost host."""
    if job.phase is not Phase.RUNNING:
        return False
    left = [w for w in job.workers.values() if without is None or w.host != without.name]
    if not job.is_fresh:
        return any(map(job.is_member, left))
    failed = [h.failed or h.slot_at(i).failed for h in job.hosts.values() for i in range(h.slots)]
    return bool(left) or not all(failed) or not failed  # a slot has not failed since the start, or there are none


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
        timeout, inside = job.limits.hang_timeout_s, job.in_round()
        if timeout and inside and all(w.waiting and w.idle_s > timeout for w in inside):  # none will ever complete
            break_round(job, f"all ranks have waited in a collective for more than {timeout:.0f} s")
        for worker in list(job.staying()):
            if not worker.joined and not worker.round and job.now_s - worker.started_s >= job.limits.start_timeout_s:
                why = f"it has not asked for a place within {job.limits.start_timeout_s:.0f} s"
                kill_hung(job, worker, why, _STACKS_S)


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
        or (mute and heard and _silence_s(job, w) >= mute and not _is_working(job, w, _silence_s(job, w)))
    ]


def _blocking_workers(job: Job) -> list[Worker]:
    """Return members without progress while all others wait, in a collective or for the next round, or hang as well."""
    timeout = job.limits.hang_timeout_s
    members = [w for w in job.members() if w.present]
    idle = [w for w in members if not w.joined and w.idle_s > timeout and not _is_working(job, w, w.idle_s)]
    blocking = [w for w in idle if not w.waiting]
    waiting = [w for w in members if w.joined or w.waiting]
    overdue = job.fault_s is not None and job.now_s - job.fault_s >= timeout
    if not timeout or not (waiting or overdue) or len(waiting) + len(blocking) < len(members):
        return []
    if not blocking and overdue:
        return idle  # they were notified that the round is broken, and have not left it
    return blocking


def _is_working(job: Job, worker: Worker, idle_s: float) -> bool:
    """Check whether a worker without progress for `idle_s` works, and is within its time."""
    since_s = job.now_s - idle_s
    seen_since_s = max(since_s + EVERY_S, job.now_s - _WORKED_S)  # CPU time before its last progress does not count
    return worker.busy_s >= seen_since_s and idle_s <= WORKING_TIMES * job.limits.hang_timeout_s
