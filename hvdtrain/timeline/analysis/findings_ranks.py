"""What a person should know of ranks: which are late, which paused, what waiting now for one and now for another costs.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Estimate, Finding
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.analysis.stragglers import Pause, Verdict

_SHARE, _LEAST_MS = 0.02, 0.2
"""Of a step: what costs less is not told."""
_MANY_PAUSES = 3
_MANY_RANKS = 4
_MOSTLY = 0.8

_CURES = {
    "gc": "make fewer objects a step there, or call gc.freeze() once everything is made",
    "cpu": "leave that host a core a thread: fewer ranks or a smaller OMP_NUM_THREADS there, or end what runs beside",
    "steal": "another virtual machine takes that host's cores: move the rank",
    "gpu clock": "look at that GPU with nvidia-smi -q -d CLOCK,PERFORMANCE",
    "gpu temperature": "look at that host's cooling",
    "gpu throttle": "look at that GPU with nvidia-smi -q -d PERFORMANCE: heat, or its power limit",
    "experts": "balance the router: an auxiliary loss or a bias a token choice",
    "sums": "look at that host's link: its speed, its errors, what else uses it",
    "between steps": "look at what that rank does between steps: logging, saving, callbacks",
}


def of_ranks(facts: Facts) -> Iterator[Finding]:
    """Findings about late ranks, pauses, and jitter."""
    yield from _late(facts)
    if facts.verdict is not None:
        yield from _pauses(facts.verdict)
        yield from _jitter(facts, facts.verdict)


def _late(facts: Facts) -> Iterator[Finding]:
    rows = {row.rank: row for row in facts.blame.ranks}
    for rank in facts.blame.late:
        row = rows[rank]
        causes = facts.blame.causes.get(rank, ())
        why = f"; {causes[0].text}" if causes else ""
        whole = sum(rows[each].cost_ms.value for each in facts.blame.late)
        together = f" (of {wording.ms(whole)} ms that late ranks cost together)" if len(facts.blame.late) > 1 else ""
        side = "after" if row.behind_ms >= 0 else "before"
        behind = f"it is usually ready {wording.ms(abs(row.behind_ms))} ms {side} them"
        text = (
            f"rank {rank}{' on ' + row.host if row.host else ''} is late: steps would be {_ms(row.cost_ms)} shorter"
            f"{together} were it like the others; {behind}, the last in {row.last_share:.0%} of steps{why}"
        )
        cures = [cure for cause in causes if (cure := _cure(facts, cause.name))][:2]
        advice = "; ".join(cures) or f"compare its host with another: hvdtrain doctor there; see rank {rank}'s lane"
        yield Finding("straggler", text, row.cost_ms.value, advice)


def _cure(facts: Facts, cause: str) -> str | None:
    if cause == "data":
        workers = int(facts.option("loader", "workers") or 0)
        if workers:
            return f"look at that host's disk and free cores; or load in more processes: --loader.workers {2 * workers}"
        return "load ahead of the step: --loader.workers 1; look at that host's disk"
    return _CURES.get(cause)


def _pauses(verdict: Verdict) -> Iterator[Finding]:
    """A line a rank; ranks that paused in the same steps, as those of a host that stood still, share one."""
    by_rank: dict[int, list[Pause]] = {}
    for pause in verdict.pauses:
        by_rank.setdefault(pause.rank, []).append(pause)
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(by_rank):
        together.setdefault(tuple(sorted(pause.step for pause in by_rank[rank])), []).append(rank)
    took = {steps: max(sum(p.ms for p in by_rank[rank]) for rank in ranks) for steps, ranks in together.items()}
    order = sorted(together, key=lambda steps: -took[steps])
    looked_at = verdict.rounds.work_ms.shape[1] + len({pause.step for pause in verdict.pauses})
    for steps in order[:_MANY_PAUSES]:
        ranks = together[steps]
        longest = max(by_rank[ranks[0]], key=lambda pause: pause.ms)
        who = f"{_names(ranks, verdict.rounds.hosts)} paused"
        they, were = ("they", "were") if len(ranks) > 1 else ("it", "was")
        text = f"{who} once: in step {longest.step} {they} {were} {_seconds(longest.ms)} later than the others"
        if len(steps) > 1:
            text = f"{who} {len(steps)} times, {_seconds(took[steps])} together; longest in step {longest.step}, "
            text += _seconds(longest.ms)
        advice = "look at what its host did then; it is left out of what ranks cost a step"
        yield Finding("pause", text, took[steps] / looked_at, advice)
    if left := order[_MANY_PAUSES:]:
        count = sum(len(together[steps]) for steps in left)
        text = f"{count} more rank{'s' if count > 1 else ''} paused, each for {_seconds(took[left[0]])} or less in all"
        yield Finding("pause", text, None, "look at what the hosts did then")


def _names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``rank 3 on a``, ``ranks 4, 5 and 2 more on a, b``."""
    shown = ", ".join(map(str, ranks[:_MANY_RANKS]))
    more = f" and {len(ranks) - _MANY_RANKS} more" if len(ranks) > _MANY_RANKS else ""
    where = list(dict.fromkeys(hosts[rank] for rank in ranks if hosts[rank]))
    on = f" on {', '.join(where)}" if 0 < len(where) <= _MANY_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}{on}"


def _jitter(facts: Facts, verdict: Verdict) -> Iterator[Finding]:
    cost = verdict.jitter_ms
    if cost.low <= max(_SHARE * verdict.rounds.step_ms, _LEAST_MS):
        return
    rank, share = _most_of_it(verdict)
    who = "now one rank is late, now another, none of them always"
    if share >= _MOSTLY:
        who = f"{share:.0%} of it in steps that wait for rank {rank}, perhaps by chance"
    advice = "fewer threads than cores, ranks bound to cores (mpirun --bind-to core), nothing else on the hosts"
    if facts.cores_explain(cost.value):
        advice = f"ranks wait for cores: {facts.for_cores()}"
    yield Finding("jitter", f"jitter costs {_ms(cost)} a step: {who}", cost.value, advice)


def _most_of_it(verdict: Verdict) -> tuple[int, float]:
    """The rank for which the others wait most, and its share of that; 0 where one is late, who is told by itself."""
    work = verdict.rounds.work_ms
    beyond = work.max(axis=0) - np.median(work, axis=0)
    by_rank = np.bincount(np.argmax(work, axis=0), weights=beyond, minlength=len(work))
    rank = int(np.argmax(by_rank))
    return rank, 0.0 if verdict.late else float(by_rank[rank] / max(1e-12, by_rank.sum()))


def _ms(estimate: Estimate) -> str:
    return f"{wording.ms(estimate.value)} ms {wording.interval(estimate)}".rstrip()


def _seconds(ms: float) -> str:
    return f"{wording.ms(ms / 1e3)} s" if ms >= 1000 else f"{wording.ms(ms)} ms"
