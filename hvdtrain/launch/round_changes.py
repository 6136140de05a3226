"""The end of a round, the members of the next one, and their ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from signal import Signals

from hvdtrain.launch.job import Host, Job, OpenRound, Phase, Worker
from hvdtrain.launch.job_end import dismiss, fail, last_failures


def break_round(job: Job, why: str) -> None:
    """Break the round after the loss of a rank: all others leave it at once."""
    if job.broken or not job.round:
        return
    job.broken = True
    job.fault_s = job.now_s
    job.commands.append(OpenRound(0, {}))
    for worker in job.in_round():
        job.send(worker, "broken", round=job.round, why=why)
    job.log_event("broken", round=job.round, why=why)


def request_change(job: Job) -> None:
    """End the round when workers wait to join or must leave, after a pause without further changes."""
    inside = job.in_round()
    if job.phase is not Phase.RUNNING or job.broken or job.changed or not inside:
        return
    why, who = _wanted_change(job)
    if who != job.wish:
        job.wish_s = job.now_s
        if not job.wish:
            job.wished_s = job.now_s
        job.wish = who
    if not who:
        return
    limits = job.limits
    if job.now_s - job.wish_s >= limits.debounce_s or job.now_s - job.wished_s >= limits.debounce_most_s:
        request_leave(job, why)


def request_leave(job: Job, why: str) -> None:
    """Have all ranks leave the round at the next step boundary."""
    if job.changed or job.broken or not job.round:
        return
    job.changed = True
    for worker in job.in_round():
        job.send(worker, "changed", why=why, leaves=bool(worker.leave_reason))
    job.log_event("changed", f"{why}: a new round begins at the next step", round=job.round)


def _wanted_change(job: Job) -> tuple[str, frozenset[int]]:
    """Return why the round should end, and the workers concerned."""
    staying = [w for w in job.members() if w.can_stay]
    waiting = [w for w in job.staying() if w.joined and not job.is_member(w)]
    waiting = waiting[: max(0, job.limits.most - len(staying))]
    going = [w for w in job.members() if w.leave_reason and not (w.dismissed or w.dying)]
    if not staying or len(staying) + len(waiting) < job.limits.least:
        going = []
    reasons = []
    if waiting:
        reasons.append(f"{len(waiting)} rank(s) wait to join")
    if going:
        reasons.append(f"{len(going)} rank(s) must leave ({going[0].leave_reason})")
    return " and ".join(reasons), frozenset(w.number for w in (*waiting, *going))


def start_next_round(job: Job) -> None:
    """Start the next round when all survivors of the last have joined again and there are enough workers."""
    if job.phase is Phase.STOPPING:
        _start_round_to_save(job)
    if job.phase is not Phase.RUNNING or job.in_round():
        return
    joined = [w for w in job.workers.values() if w.joined and w.present]
    if not joined or not (_gathered(job, joined) if job.is_fresh else any(map(job.is_member, joined))):
        return  # no joined worker holds the state: the last that does is dying
    staying = [w for w in joined if not w.leave_reason]
    survivors = [w for w in staying if w.round]
    if len(staying) >= job.limits.least and (job.is_fresh or survivors):
        for worker in joined:
            if worker.leave_reason:
                dismiss(job, worker, worker.leave_reason)
        joined = staying
    if len(joined) >= job.limits.least:
        start_round(job, order(joined, job.hosts)[: job.limits.most])


def _gathered(job: Job, joined: list[Worker]) -> bool:
    """Check whether the first round may begin: all requested ranks have joined, and no further one is about to."""
    limits, waited_s = job.limits, job.now_s - job.began_s
    if waited_s >= limits.start_timeout_s:
        return True
    wanted = limits.start
    if job.restarts and limits.elastic:
        usable = sum(h.slots for h in job.hosts.values() if not h.failures)
        wanted = max(limits.least, min(wanted, usable))
    if len(joined) < wanted:
        return False
    return len(joined) == len(job.staying()) or job.now_s - job.joined_s >= limits.debounce_s


def _start_round_to_save(job: Job) -> None:
    """Start a last round of the survivors in which they save, when the job was stopped between two rounds."""
    between = [w for w in job.members() if w.joined and not (w.dismissed or w.dying)]
    if between and not job.in_round() and not any(w.leaving for w in job.members()):
        start_round(job, order(between, job.hosts))
        for worker in between:
            job.send(worker, "stop", signal=Signals(job.code - 128).name)


def start_round(job: Job, chosen: list[Worker]) -> None:
    """Start a round of these workers, in the order of their ranks."""
    limits = job.limits
    if job.round and limits.reset_limit is not None and job.round > limits.reset_limit:
        return fail(job, f"change of membership {job.round} exceeds --reset-limit {limits.reset_limit}")
    step = max(w.step for w in chosen)
    job.fruitless_rounds = job.fruitless_rounds + 1 if job.broken and step <= job.began_step else 0
    if job.fruitless_rounds >= limits.fruitless:
        return fail(job, f"{job.fruitless_rounds} rounds in a row broke before one step was done{last_failures(job)}")
    old = job.size if not job.is_fresh else 0
    job.round += 1
    job.began_step = step
    placed = list(zip(chosen, places(chosen), strict=True))
    keys = {f"rank_and_size/{w.host}:{p['local_rank']}": ",".join(map(str, p.values())) for w, p in placed}
    job.commands.append(OpenRound(job.round, keys))
    for worker, place in placed:
        worker.round, worker.rank, worker.joined = job.round, place["rank"], False
        worker.idle_s, worker.waiting, worker.entered_s = 0.0, False, job.now_s
        facts = {"round": job.round, **place, "host": worker.host, "timeout_s": limits.gloo_timeout(len(chosen))}
        job.send(worker, "round", **facts)
    what = f"round {job.round}: {len(chosen)} rank(s) on {len({w.host for w in chosen})} host(s)"
    if job.fault_s is not None:
        what += f", {job.now_s - job.fault_s:.2f} s after the fault"
    elif old:
        what += f", {old} rank(s) before"
    job.log_event("round", what, round=job.round, size=len(chosen), workers=[w.number for w in chosen])
    job.size, job.is_fresh, job.broken, job.changed = len(chosen), False, False, False
    job.fault_s, job.short_s, job.wish = None, None, frozenset()


def order(workers: Sequence[Worker], hosts: Mapping[str, Host]) -> list[Worker]:
    """Sort workers by future rank: survivors in their old order, those of this host first, then newcomers.

    So rank 0, which writes and prints, holds the state and stays the same process while that lives.
    """
    position = {name: index for index, name in enumerate(hosts)}

    def key(worker: Worker) -> tuple[bool, bool, int, int, int, int]:
        away = not hosts[worker.host].local
        newcomer = worker.round == 0
        return newcomer, away, -worker.round, worker.rank, position[worker.host], worker.slot

    return sorted(workers, key=key)


def places(workers: Sequence[Worker]) -> list[dict[str, int]]:
    """Return Horovod's six numbers of each place, for workers in the order of their ranks."""
    local: Counter[str] = Counter()
    numbers = []
    for worker in workers:
        numbers.append(local[worker.host])
        local[worker.host] += 1
    across = Counter(numbers)
    met: Counter[int] = Counter()
    result = []
    for rank, (worker, number) in enumerate(zip(workers, numbers, strict=True)):
        place = {"rank": rank, "size": len(workers), "local_rank": number, "local_size": local[worker.host]}
        result.append({**place, "cross_rank": met[number], "cross_size": across[number]})
        met[number] += 1
    return result
