"""The end of a job: finished, stopped by a signal, or failed."""

from __future__ import annotations

import signal

from hvdtrain.errors import USAGE
from hvdtrain.launch.job import End, Job, KillWorker, Phase, Worker


def dismiss(job: Job, worker: Worker, why: str) -> None:
    """Dismiss a worker: notify it that there is no place, and kill it if it stays."""
    if worker.dismissed or worker.dying:  # the exit of a dying worker is still to be reported
        return
    inside = job.is_in_round(worker)
    worker.dismissed, worker.deadline_s = why, job.now_s + job.limits.end_s
    if worker.joined:
        send_end(job, worker)
        worker.deadline_s = job.now_s + job.limits.stop_s
    elif not (inside and job.broken):  # a rank of a broken round asks for the next round, and gets the answer then
        job.commands.append(KillWorker(worker.number, worker.host))
    job.log_event("dismissed", worker=worker.number, why=why)


def send_end(job: Job, worker: Worker) -> None:
    """Notify a worker that has joined that there is no place."""
    job.send(worker, "end", why=worker.dismissed, failed=job.phase is Phase.ENDING)


def last_failures(job: Job) -> str:
    """Return the latest failures, for the message that ends a job."""
    return "".join(f"\n  {text}" for text in job.failures)


def fail(job: Job, why: str, code: int = 1, *, save: bool = False) -> None:
    """End the job with an error. `save`: ranks in a round get time to save, as after SIGTERM."""
    if job.phase in (Phase.ENDING, Phase.OVER):
        return
    job.phase, job.code = Phase.ENDING, code
    job.log_event("failed", f"the job ends: {why}", why=why, code=code)
    for worker in list(job.workers.values()):
        if save and job.is_member(worker) and not worker.joined:
            job.send(worker, "stop", signal="SIGTERM")
            worker.dismissed, worker.deadline_s = why, job.now_s + job.limits.stop_s
        else:
            dismiss(job, worker, why)


def stop_job(job: Job, name: str) -> None:
    """Stop the job after a signal: all ranks save and end; a second signal kills them."""
    number = signal.Signals[name].value
    if job.phase in (Phase.STOPPING, Phase.ENDING):
        job.log_event("signal", f"{name} again: every rank is killed")
        for worker in job.workers.values():
            worker.dismissed = worker.dismissed or name
            job.commands.append(KillWorker(worker.number, worker.host))
        job.code = job.code or 128 + number
        return
    if job.phase is Phase.OVER:
        return
    job.phase, job.code, job.deadline_s = Phase.STOPPING, 128 + number, job.now_s + job.limits.stop_s
    text = f"{name}: all ranks save and end; they are killed after {job.limits.stop_s:.0f} s or a second signal"
    job.log_event("signal", text)
    for worker in job.workers.values():
        if not job.is_member(worker):
            dismiss(job, worker, name)
        elif not worker.joined and not worker.leaving:
            job.send(worker, "stop", signal=name)


def mark_leaving(job: Job, worker: Worker, why: str) -> None:
    """Note that a rank has reached the end of training; the job will soon be over."""
    worker.leaving, worker.deadline_s = why, job.now_s + job.limits.leave_s
    if job.phase is Phase.RUNNING:
        job.phase = Phase.FINISHING
        job.code = _code_of(why)
        job.log_event("finishing", why=why)
    if job.phase is Phase.FINISHING:  # a stopping job has its own deadline
        job.deadline_s = job.now_s + job.limits.grace_s


def _code_of(why: str) -> int:
    """Return the exit code of a rank that ends for this reason."""
    return 128 + signal.Signals[why].value if why in signal.Signals.__members__ else 0


def finish_leaving(job: Job, worker: Worker, code: int) -> None:
    """Handle the exit of a rank that had reported its end. With any other exit code the work counts as not done."""
    if code not in (0, _code_of(worker.leaving)):
        job.spoiled = f"{worker.label} had finished training, and then {describe_exit(code)}"
        job.log_event("spoilt", job.spoiled)
    if job.phase is Phase.FINISHING:
        job.deadline_s = job.now_s + job.limits.grace_s


def restart_or_fail(job: Job, why: str) -> None:
    """Restart the whole job where --restarts allows, as no rank with the state is left; otherwise fail."""
    if job.last_code == USAGE:
        return fail(job, f"{why}{last_failures(job)}", USAGE)
    if job.restarts >= job.limits.restarts:
        offered = f" after {job.restarts} restart(s)" if job.limits.restarts else ""
        goes_on = job.trained and not job.limits.restarts
        hint = "\n  the same command resumes from the last checkpoint; --restarts N does so itself" if goes_on else ""
        return fail(job, f"{why}{offered}{last_failures(job)}{hint}")
    job.restarts += 1
    job.short_s = None
    job.phase, job.code, job.spoiled, job.last_code = Phase.RUNNING, 0, "", 0
    job.is_fresh, job.broken, job.changed, job.began_s = True, False, False, job.now_s
    for host in job.hosts.values():
        host.failed = False
        for place in host.slots_by_index.values():
            place.failed = False
    for worker in job.workers.values():
        if worker.round or worker.leaving:
            dismiss(job, worker, "the whole job restarts")
    where = ", from the last checkpoint" if job.trained else ""
    text = f"{why}: the whole job restarts ({job.restarts} of {job.limits.restarts}){where}"
    job.log_event("restart", text, restart=job.restarts)


def end_overdue(job: Job) -> None:
    """Kill workers past their deadline, and end the job when no worker is alive."""
    for worker in list(job.workers.values()):
        if job.now_s >= worker.deadline_s:
            worker.deadline_s = job.now_s + job.limits.end_s
            job.commands.append(KillWorker(worker.number, worker.host))
            job.log_event("overdue", f"{worker.label} did not end in time: killed", worker=worker.number)
    if job.phase is Phase.FINISHING:
        for worker in list(job.workers.values()):
            if (worker.joined or not job.is_member(worker)) and not worker.leaving:
                dismiss(job, worker, "training is finished")
    if job.phase in (Phase.FINISHING, Phase.STOPPING) and job.now_s >= job.deadline_s:
        job.deadline_s = job.now_s + job.limits.end_s
        for worker in job.workers.values():
            if job.phase is Phase.STOPPING or not worker.leaving:
                worker.dismissed = worker.dismissed or "the job is over"
                job.commands.append(KillWorker(worker.number, worker.host))
    if job.phase is Phase.FINISHING and not job.workers and job.spoiled:
        restart_or_fail(job, job.spoiled)
    if job.phase in (Phase.FINISHING, Phase.STOPPING, Phase.ENDING) and not job.workers:
        job.phase = Phase.OVER
        job.log_event("over", code=job.code)
        job.commands.append(End(job.code))


def describe_exit(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
