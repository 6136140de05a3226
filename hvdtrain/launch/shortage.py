"""Handle a shortage of ranks: report the wait and its limit, and end the job after it."""

from __future__ import annotations

from hvdtrain.launch.job import Job, Phase, Worker
from hvdtrain.launch.job_end import fail, last_failures

_STALLED_S = 10.0
"""Time without another ready rank after which the missing hosts are reported at the start."""


def check_shortage(job: Job) -> None:
    """End the job when it has had fewer workers than it needs for too long; they keep the state meanwhile."""
    if job.phase is not Phase.RUNNING:
        return
    limits = job.limits
    if job.is_fresh:
        _report_wait(job)
        if job.now_s - job.began_s >= limits.start_timeout_s and len(job.staying()) < limits.least:
            _give_up(job, limits.start_timeout_s, "--start-timeout", limits.least)
        elif job.now_s - job.began_s >= 2 * limits.start_timeout_s:
            _give_up(job, 2 * limits.start_timeout_s, "--start-timeout", limits.least)
        return
    present = [w for w in job.staying() if w.joined or job.is_member(w)]
    if len(present) >= limits.least or not limits.elastic:  # else the first loss ends it
        job.short_s = None
    elif job.short_s is None:
        job.short_s = job.now_s
        job.log_event("short", _short_text(job, present), here=len(present))
    elif job.now_s - job.short_s >= limits.elastic_timeout_s:
        _give_up(job, limits.elastic_timeout_s, "--elastic-timeout", limits.least)


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
        after_s, absent = (
            _STALLED_S,
            [name for name, host in job.hosts.items() if _has_free_slot(job, name, host.slots)],
        )
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


def _has_free_slot(job: Job, name: str, slots: int) -> bool:
    """Check whether a host has slots without a ready rank."""
    return slots > len([w for w in job.staying() if w.joined and w.host == name])


def _give_up(job: Job, seconds: float, option: str, wanted: int) -> None:
    present = [w for w in job.staying() if w.joined or (job.is_member(w) and not job.is_fresh)]
    state = ", ".join(
        f"{h.name}: {h.slots} slot(s){'' if h.agent == 'ready' else ', not reached'}" for h in job.hosts.values()
    )
    why = f"after {seconds:.0f} s ({option}) there are {len(present)} of at least {wanted} ranks"
    training = len(_training(job))
    saving = f"\n  {training} rank(s) that train get SIGTERM to save and end" if training else ""
    fail(job, f"{why}\n  hosts: {state or 'none was named'}{saving}{last_failures(job)}", save=True)
