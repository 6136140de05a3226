"""What becomes of a job when a worker or the agent of a host is gone."""

from __future__ import annotations

from hvdtrain.launch.commands import StopAgent
from hvdtrain.launch.ends import USAGE, fail, left, lost, said_of_code
from hvdtrain.launch.filling import cool
from hvdtrain.launch.job import Host, Job, Phase, Worker
from hvdtrain.launch.rounds import break_round


def exited(job: Job, worker: Worker, code: int, text: str = "") -> None:
    """A worker is gone. `text`: why, where its exit code does not say."""
    said = text or said_of_code(code)
    member = worker.round == job.round and job.round > 0 and not job.fresh
    inside = job.is_inside(worker)
    del job.workers[worker.number]
    job.note("exited", worker=worker.number, host=worker.host, code=code, member=member, why=worker.ended)
    if inside:
        break_round(job, f"{worker.label} {said}")
    if worker.leaving:
        left(job, worker, code)
    elif worker.ended:
        if worker.drained:
            job.hosts[worker.host].place(worker.slot).free_s = job.now_s + job.limits.cooldown_most_s
    elif job.phase is Phase.RUNNING and code == 0 and not worker.joined and _nobody_ever_joined(job):
        _without_a_word(job, worker)
    else:
        _failed(job, worker, code, said)


def _failed(job: Job, worker: Worker, code: int, said: str) -> None:
    place = job.hosts[worker.host].place(worker.slot)
    seconds = cool(job, place)
    text = f"{worker.label} {said}"
    job.failures = [*job.failures[-9:], text]
    again = job.limits.elastic and job.phase is Phase.RUNNING and not (job.fresh and code == USAGE)
    job.note("fault", f"{text}; started again in {seconds:.0f} s" if again else text)
    if job.phase is not Phase.RUNNING:
        if job.phase is Phase.FINISHING and worker.rank == 0:
            job.spoilt = text
        return
    job.last_code = code
    if job.fresh and code == USAGE:
        fail(job, text, USAGE)
    elif not job.limits.elastic:
        lost(job, text)


def _nobody_ever_joined(job: Job) -> bool:
    return not job.rounds and not any(w.joined for w in job.workers.values())


def _without_a_word(job: Job, worker: Worker) -> None:
    """It ended well before it asked for a place: a program that has nothing to train, such as one asked for help."""
    worker.leaving = "finished"
    job.phase = Phase.FINISHING
    job.until_s = job.now_s + job.limits.grace_s


def agent_lost(job: Job, host: Host, why: str) -> None:
    """The agent of a host is gone, and with it all that it started."""
    if not host.agent:
        return
    host.agent = ""
    job.out.append(StopAgent(host.name))
    seconds = cool(job, host)
    text = f"{host.name} is lost: {why}"
    job.failures = [*job.failures[-9:], text]
    job.note("host_lost", f"{text}; tried again in {seconds:.0f} s" if job.limits.elastic else text, host=host.name)
    for worker in [w for w in job.workers.values() if w.host == host.name]:
        exited(job, worker, 1, "is lost with its host")
    if not job.limits.elastic and job.phase is Phase.RUNNING:
        lost(job, text)


def nobody(job: Job) -> None:
    """End, or start again, when no rank is left that holds the state, or none ever came so far."""
    if job.phase is not Phase.RUNNING:
        return
    if job.fresh:
        if not job.workers and not _untried(job):
            lost(job, "no process came so far as to join")
    elif not job.members():
        lost(job, "no rank is left")


def _untried(job: Job) -> bool:
    """Whether there is a slot that has not failed since all was started, or none at all."""
    hosts = [h for h in job.hosts.values() if h.slots]
    failed = [h.failed or h.place(i).failed for h in hosts for i in range(h.slots)]
    return not all(failed) or not failed


def short(job: Job) -> None:
    """End the job when fewer workers than it needs have been there for too long; they hold the state so long."""
    if job.phase is not Phase.RUNNING:
        return
    limits = job.limits
    if job.fresh:
        if job.now_s - job.began_s >= limits.start_timeout_s and len(job.staying()) < limits.least:
            _give_up(job, limits.start_timeout_s, "--start-timeout", limits.least)
        elif job.now_s - job.began_s >= 2 * limits.start_timeout_s:
            _give_up(job, 2 * limits.start_timeout_s, "--start-timeout", limits.least)
        return
    here = [w for w in job.staying() if w.joined or job.is_member(w)]
    if len(here) >= limits.least:
        job.short_s = None
        return
    if job.short_s is None:
        job.short_s = job.now_s
        wait = f"waiting up to {limits.elastic_timeout_s:.0f} s"
        job.note("short", f"{len(here)} rank(s), and at least {limits.least} are needed: {wait}", here=len(here))
    elif job.now_s - job.short_s >= limits.elastic_timeout_s:
        _give_up(job, limits.elastic_timeout_s, "--elastic-timeout", limits.least)


def _give_up(job: Job, seconds: float, option: str, wanted: int) -> None:
    here = [w for w in job.staying() if w.joined or (job.is_member(w) and not job.fresh)]
    state = ", ".join(
        f"{h.name}: {h.slots} slot(s){'' if h.agent == 'ready' else ', not reached'}" for h in job.hosts.values()
    )
    why = f"after {seconds:.0f} s ({option}) there are {len(here)} of at least {wanted} ranks"
    found = "".join(f"\n  {text}" for text in job.failures[-5:])
    fail(job, f"{why}\n  hosts: {state or 'none was named'}{found}", save=True)
