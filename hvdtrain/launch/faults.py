"""Consequences of a lost worker or agent."""

from __future__ import annotations

from hvdtrain.errors import USAGE
from hvdtrain.launch.commands import StopAgent
from hvdtrain.launch.job import Host, Job, Phase, Worker
from hvdtrain.launch.job_end import describe_exit, fail, finish_leaving, restart_or_fail
from hvdtrain.launch.round_changes import break_round
from hvdtrain.launch.worker_starts import start_cooldown


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
    member = worker.round == job.round and job.round > 0 and not job.is_fresh
    inside = job.is_in_round(worker)
    del job.workers[worker.number]
    job.log_event("exited", worker=worker.number, host=worker.host, code=code, member=member, why=worker.dismissed)
    if inside:
        break_round(job, f"{worker.label} {said}")
    if worker.leaving:
        finish_leaving(job, worker, code)
    elif worker.dismissed:
        if worker.drained:
            job.hosts[worker.host].slot_at(worker.slot).free_s = job.now_s + job.limits.cooldown_most_s
    elif job.phase is Phase.RUNNING and code == 0 and not worker.joined and _nobody_ever_joined(job):
        _end_without_joining(job, worker)
    else:
        _failed(job, worker, code, said)


def _failed(job: Job, worker: Worker, code: int, said: str) -> None:
    place = job.hosts[worker.host].slot_at(worker.slot)
    seconds = start_cooldown(job, place)
    text = f"{worker.label} {said}"
    job.remember_failure(text)
    final = code == USAGE and (job.is_fresh or not any(w.step > 0 for w in (worker, *job.members())))
    again = (
        job.limits.elastic
        and not final
        and _can_continue(job)
        and (job.is_fresh or any(w.present for w in job.members()))
    )
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


def _nobody_ever_joined(job: Job) -> bool:
    return not job.rounds and not any(w.joined for w in job.workers.values())


def _end_without_joining(job: Job, worker: Worker) -> None:
    """End the job after a worker exited with 0 before it joined: its program does not train, such as ``--help``."""
    worker.leaving = "finished"
    job.phase = Phase.FINISHING
    job.deadline_s = job.now_s + job.limits.grace_s


def lose_host(job: Job, host: Host, why: str) -> None:
    """Handle the loss of a host's agent, and of all workers that it started."""
    if not host.agent:
        return
    host.agent = ""
    job.commands.append(StopAgent(host.name))
    seconds = start_cooldown(job, host)
    text = f"{host.name} is lost: {why}"
    job.remember_failure(text)
    again = job.limits.elastic and _can_continue(job, without=host)
    job.log_event("host_lost", f"{text}; it will be tried again in {seconds:.0f} s" if again else text, host=host.name)
    for worker in [w for w in job.workers.values() if w.host == host.name]:
        handle_exit(job, worker, 1, "is lost with its host")
    if not job.limits.elastic and job.phase is Phase.RUNNING:
        restart_or_fail(job, text)


def check_survivors(job: Job) -> None:
    """Restart or end the job when no rank with the state is left, or none has ever joined."""
    if job.phase is not Phase.RUNNING:
        return
    if not _can_continue(job):
        restart_or_fail(job, "no process got as far as joining" if job.is_fresh else "no rank is left")


def _can_continue(job: Job, without: Host | None = None) -> bool:
    """Check whether a rank with the state is left, or one may still join the first round. `without`: a lost host."""
    if job.phase is not Phase.RUNNING:
        return False
    left = [w for w in job.workers.values() if without is None or w.host != without.name]
    return bool(left) or _untried(job) if job.is_fresh else any(map(job.is_member, left))


def _untried(job: Job) -> bool:
    """Check whether a slot has not failed since the start, or there are no slots."""
    hosts = [h for h in job.hosts.values() if h.slots]
    failed = [h.failed or h.slot_at(i).failed for h in hosts for i in range(h.slots)]
    return not all(failed) or not failed
