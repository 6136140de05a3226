"""Start missing agents and workers. Failed hosts and slots are retried after a cooldown, for ever."""

from __future__ import annotations

from hvdtrain.launch.commands import StartAgent, StartWorker, StopAgent
from hvdtrain.launch.job import Host, Job, Phase, Slot, Worker
from hvdtrain.launch.round_changes import order, places


def set_hosts(job: Job, hosts: dict[str, int], local: frozenset[str]) -> None:
    """Set the slots that may be used. Workers on removed slots leave at the next round."""
    for name, slots in hosts.items():
        host = job.hosts.setdefault(name, Host(name, name in local))
        if host.slots != slots:
            job.log_event(
                "slots", f"{name}: {host.slots} -> {slots} slot(s)" if job.rounds else "", host=name, slots=slots
            )
        host.slots = slots
    for name, host in job.hosts.items():
        if name not in hosts and host.slots:
            job.log_event("slots", f"{name} is removed", host=name, slots=0)
            host.slots = 0
    for worker in job.workers.values():
        fits = worker.slot < job.hosts[worker.host].slots
        if not fits and not worker.leave_reason:
            worker.leave_reason = f"{worker.host} no longer has a slot for it"
        elif fits and not worker.drained:
            worker.leave_reason = ""


def start_missing(job: Job) -> None:
    """Start agents and workers where there is room, and stop unused agents."""
    if job.phase is not Phase.RUNNING:
        return
    for host in job.hosts.values():
        if host.slots and not host.agent and job.now_s >= host.free_s:
            host.agent, host.heard_s = "starting", job.now_s
            job.commands.append(StartAgent(host.name))
        elif host.agent == "ready" and not host.slots and not any(w.host == host.name for w in job.workers.values()):
            host.agent = ""
            job.commands.append(StopAgent(host.name))
    taken = {(w.host, w.slot) for w in job.workers.values()}
    count = len(job.staying())
    started = []
    for host in job.hosts.values():
        for index in range(host.slots if host.agent == "ready" else 0):
            if count < job.limits.most and (host.name, index) not in taken and job.now_s >= host.slot_at(index).free_s:
                started.append(_worker(job, host, index))
                count += 1
    if started:
        _start(job, started)


def _worker(job: Job, host: Host, index: int) -> Worker:
    job.workers_started += 1
    worker = Worker(job.workers_started, host.name, index, job.now_s)
    job.workers[worker.number] = worker
    return worker


def _start(job: Job, started: list[Worker]) -> None:
    """Start workers, each with an estimate of its place: as if all living workers were in the next round.

    The reported size counts every slot as used, and is at least 2 where that is possible. Settings that must be equal
    on all ranks depend on it: a rank that starts first or alone must get the same size as the others.
    """
    guess = order(job.staying(), job.hosts)
    room = sum(host.slots for host in job.hosts.values())
    size = max(len(guess), min(job.limits.most, max(room, 2)))
    for worker, place in zip(guess, places(guess), strict=True):
        if worker in started:
            local_size = max(place["local_size"], min(job.hosts[worker.host].slots, size))
            place |= {"size": size, "local_size": local_size}
            job.commands.append(StartWorker(worker.number, worker.host, place))
            job.log_event("started", worker=worker.number, host=worker.host, slot=worker.slot)


def start_cooldown(job: Job, place: Host | Slot) -> float:
    """Start the cooldown of a failed host or slot; return its seconds."""
    place.failures += 1
    seconds = min(job.limits.cooldown_most_s, job.limits.cooldown_s * 2.0 ** min(place.failures - 1, 30))
    place.failed, place.free_s = True, job.now_s + seconds
    return seconds


def forget_old_failures(job: Job) -> None:
    """Forget the failures of slots with workers that have been in rounds for `forgive_after_s`."""
    for worker in job.in_round():
        if job.now_s - worker.entered_s >= job.limits.forgive_after_s:
            host = job.hosts[worker.host]
            host.failures = host.slot_at(worker.slot).failures = 0
