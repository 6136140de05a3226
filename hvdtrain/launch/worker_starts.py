"""Start missing agents and workers; while there are too few, report the wait and its limit.

Failed hosts and slots are retried after a cooldown, for ever.
"""

from __future__ import annotations

from collections import Counter

from hvdtrain.launch.job import Host, Job, Phase, Slot, StartAgent, StartWorker, StopAgent, Worker
from hvdtrain.launch.job_end import fail, last_failures
from hvdtrain.launch.round_changes import order, places

_STALLED_S = 10.0  # time without another ready rank after which the missing hosts are reported at the start


def set_hosts(job: Job, hosts: dict[str, int], local: frozenset[str]) -> None:
    """Set the slots that may be used. Workers on removed slots leave at the next round."""
    for name, slots in hosts.items():
        host = job.hosts.setdefault(name, Host(name, name in local))
        slots = 0 if host.left_out else slots
        if host.slots != slots:
            text = f"{name}: {host.slots} -> {slots} slot(s)" if job.round else ""
            job.log_event("slots", text, host=name, slots=slots)
        host.slots = slots
    for name, host in job.hosts.items():
        if name not in hosts and host.slots:
            job.log_event("slots", f"{name} is removed", host=name, slots=0)
            host.slots = 0
    _release_workers(job)


def _release_workers(job: Job) -> None:
    """Let workers without a slot leave, and those with one stay."""
    for worker in job.workers.values():
        host = job.hosts[worker.host]
        fits = worker.slot < host.slots
        if not fits and not worker.leave_reason:
            no_slot = f"{host.name} no longer has a slot for it"
            worker.leave_reason = "its host has computed wrong bits" if host.left_out else no_slot
        elif fits and not worker.drained:
            worker.leave_reason = ""


def leave_out(job: Job, host: Host, why: str) -> None:
    """Use no slot of a host from now on, if the others have enough."""
    room = sum(other.slots for other in job.hosts.values() if other is not host and not other.failures)
    if host.left_out or not job.limits.elastic or room < job.limits.least:
        stays = f"{host.name} stays: without it there would be too few ranks"
        job.log_event("wrong", f"{why}; {stays}" if job.limits.elastic else why, host=host.name)
        return
    host.left_out, host.slots = True, 0
    job.log_event("wrong", f"{why}: {host.name} is left out for the rest of the job", host=host.name)
    _release_workers(job)


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
                job.workers_started += 1
                worker = job.workers[job.workers_started] = Worker(job.workers_started, host.name, index, job.now_s)
                started.append(worker)
                count += 1
    if started:
        _start(job, started)


def _start(job: Job, started: list[Worker]) -> None:
    """Start workers, each with an estimate of its place: as if all living workers were in the next round.

    The reported size counts every slot as used, and is at least 2 where that is possible. Settings that must be equal
    on all ranks depend on it: a rank that starts first or alone must get the same size as the others.
    """
    guess, numbers = order(job.staying(), job.hosts), {worker.number for worker in started}
    room = sum(host.slots for host in job.hosts.values())
    size = max(len(guess), min(job.limits.most, max(room, 2)))
    for worker, place in zip(guess, places(guess), strict=True):
        if worker.number in numbers:
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


def check_shortage(job: Job) -> None:
    """End the job when it has had fewer workers than it needs for too long; they keep the state meanwhile."""
    if job.phase is not Phase.RUNNING:
        return
    limits = job.limits
    if job.is_fresh:
        _report_wait(job)
        limit_s = limits.start_timeout_s * (1 if len(job.staying()) < limits.least else 2)
        if job.now_s - job.began_s >= limit_s:
            _give_up(job, limit_s, "--start-timeout")
        return
    present = [w for w in job.staying() if w.joined or job.is_member(w)]
    if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it
        job.short_s = None
    elif job.short_s is None:
        job.short_s = job.now_s
        job.log_event("short", _short_text(job, present), here=len(present))
    elif job.now_s - job.short_s >= limits.elastic_timeout_s:
        _give_up(job, limits.elastic_timeout_s, "--elastic-timeout")


def _short_text(job: Job, present: list[Worker]) -> str:
    """Return the message about too few ranks; "" where no rank is left to wait."""
    least, seconds = job.limits.least, f"{job.limits.elastic_timeout_s:.0f} s"
    training = _training(job)
    going = [w for w in training if w.leave_reason]
    if going:
        who = f"{len(training)} rank(s) continue to train, though {len(going)} must leave ({going[0].leave_reason})"
        return f"{who}: at least {least} are needed; the job ends in {seconds} (--elastic-timeout) unless others join"
    if not any(w.present for w in job.members()):
        return ""
    return f"{len(present)} rank(s), and at least {least} are needed: waiting up to {seconds}"


def _training(job: Job) -> list[Worker]:
    return [] if job.broken else job.in_round()


def _report_wait(job: Job) -> None:
    """Report once what the start waits for: slots or ranks. Hosts may still be discovered."""
    limits, room = job.limits, sum(host.slots for host in job.hosts.values())
    wanted = limits.least if job.restarts else limits.start
    ready = [w for w in job.staying() if w.joined]
    since_s = max(job.began_s, job.joined_s)
    if room < wanted:
        after_s, hosts = limits.debounce_s, len([host for host in job.hosts.values() if host.slots])
        what = f"{room} slot(s) on {hosts} host(s), {wanted} ranks requested"
    elif 0 < len(ready) < wanted and not _starting(job):
        after_s = _STALLED_S
        used = Counter(w.host for w in ready)
        absent = [name for name, host in job.hosts.items() if host.slots > used[name]]
        what = f"{len(ready)} of {wanted} requested rank(s) ready, missing on {', '.join(absent)}"
    else:
        job.short_s = None
        return
    if job.short_s is None and job.now_s - since_s >= after_s:
        job.short_s = job.now_s
        wait = f"waiting up to {max(0.0, job.began_s + limits.start_timeout_s - job.now_s):.0f} s (--start-timeout)"
        then = f", then {limits.least} are enough" if limits.least <= room and limits.least < wanted else ""
        job.log_event("short", f"{what}: {wait}{then}", here=min(room, len(ready)))


def _starting(job: Job) -> bool:
    """Check whether a host or rank that has not failed is still starting."""
    hosts = [h for h in job.hosts.values() if h.slots and not h.failures]
    slow = [w for w in job.staying() if not w.joined and not job.hosts[w.host].slot_at(w.slot).failures]
    return bool(slow) or any(host.agent != "ready" for host in hosts)


def _give_up(job: Job, seconds: float, option: str) -> None:
    present = [w for w in job.staying() if w.joined or (job.is_member(w) and not job.is_fresh)]
    hosts = job.hosts.values()
    state = ", ".join(f"{h.name}: {h.slots} slot(s){'' if h.agent == 'ready' else ', not reached'}" for h in hosts)
    why = f"after {seconds:.0f} s ({option}) there are {len(present)} of at least {job.limits.least} ranks"
    training = len(_training(job))
    saving = f"\n  {training} rank(s) that train get SIGTERM to save and end" if training else ""
    fail(job, f"{why}\n  hosts: {state or 'none was named'}{saving}{last_failures(job)}", save=True)
