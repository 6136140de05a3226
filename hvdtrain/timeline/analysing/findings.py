"""What a person should know of a run, in plain words: each with its number, its cost and what to try. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysing.budget import ASIDE, EXCHANGE, LATE, OTHER_EXCHANGE
from hvdtrain.timeline.analysing.facts import Facts
from hvdtrain.timeline.analysing.findings_horovod import of_timeline
from hvdtrain.timeline.analysing.phases import COPIES, NEGOTIATION, QUEUE, TRANSFER
from hvdtrain.timeline.analysing.rounds import warm_up
from hvdtrain.timeline.analysis import Estimate, Finding
from hvdtrain.timeline.log_facts import STALLED

_SHARE = 0.02
"""Of a step: what costs less is not told."""
_ASIDE_SHARE = 0.1
_CPU_SHARE, _SLOW_BUS = 0.05, 0.5
_MANY_PAUSES = 3
_LITTLE_BYTES = 1 << 20


def find(facts: Facts) -> list[Finding]:
    """All findings, most costly first; those of unknown cost last."""
    found = [*_late(facts), *_pauses(facts), *_jitter(facts), *_stalls(facts)]
    if facts.run.steps is not None and facts.budget is not None:
        for rule in (_exposed, _input, _collections, _aside, _cores, _bandwidth):
            found += rule(facts)
    elif facts.budget is not None:
        found += of_timeline(facts.run, facts.budget, facts.communication, ticks=facts.blame.source == "ticks")
    return sorted(found, key=lambda finding: -(finding.cost_ms or 0.0))


_CURES = {
    "data": "load ahead of the step: --loader.workers 1; look at that host's disk",
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


def _late(facts: Facts) -> Iterator[Finding]:
    rows = {row.rank: row for row in facts.blame.ranks}
    for rank in facts.blame.late:
        row = rows[rank]
        causes = facts.blame.causes.get(rank, ())
        why = f"; {causes[0].text}" if causes else ""
        whole = sum(rows[each].cost_ms.value for each in facts.blame.late)
        together = f" (of {wording.ms(whole)} ms that late ranks cost together)" if len(facts.blame.late) > 1 else ""
        behind = (
            f"it is usually ready {wording.ms(row.behind_ms)} ms after them, the last in {row.last_share:.0%} of steps"
        )
        text = (
            f"rank {rank}{' on ' + row.host if row.host else ''} is late: steps would be {_ms(row.cost_ms)} shorter"
            f"{together} were it like the others; {behind}{why}"
        )
        cures = [_CURES[cause.name] for cause in causes if cause.name in _CURES][:2]
        advice = "; ".join(cures) or f"compare its host with another: hvdtrain doctor there; see rank {rank}'s lane"
        yield Finding("straggler", text, row.cost_ms.value, advice)


def _pauses(facts: Facts) -> Iterator[Finding]:
    pauses = facts.verdict.pauses if facts.verdict else ()
    for pause in pauses[:_MANY_PAUSES]:
        text = f"rank {pause.rank} paused once: in step {pause.step} it was {_seconds(pause.ms)} later than the others"
        advice = "look at what its host did then; it is left out of what ranks cost a step"
        yield Finding("pause", text, None, advice)
    if len(pauses) > _MANY_PAUSES:
        whole = sum(pause.ms for pause in pauses[_MANY_PAUSES:])
        text = f"{len(pauses) - _MANY_PAUSES} more such pauses took {_seconds(whole)} together"
        yield Finding("pause", text, None, "look at what the hosts did then")


def _jitter(facts: Facts) -> Iterator[Finding]:
    if facts.verdict is None:
        return
    cost = facts.verdict.jitter_ms
    if cost.low > max(_SHARE * facts.verdict.rounds.step_ms, 0.2):
        text = f"jitter costs {_ms(cost)} a step: now one rank is late, now another, none of them always"
        advice = "fewer threads than cores, ranks bound to cores (mpirun --bind-to core), nothing else on the hosts"
        if _cores_short(facts) is not None:
            advice = "ranks wait for cores: see what is said of that"
        yield Finding("jitter", text, cost.value, advice)


def _exposed(facts: Facts) -> Iterator[Finding]:
    """Communication that backward does not hide, beyond waiting for late ranks."""
    assert facts.budget is not None
    pieces = [p for p in facts.budget.parts if p.name in facts.budget.exposed and p.name != LATE]
    cost = sum(piece.ms.value for piece in pieces)
    if cost < _SHARE * facts.step_ms:
        return
    largest = max(pieces, key=lambda piece: piece.ms.value)
    share = cost / facts.step_ms
    mostly = f", most of it {largest.name}" if len(pieces) > 1 else ""
    took = f"{wording.ms(cost)} ms of a step ({share:.0%})"
    text = f"{took} wait for sums of gradients after the last rank is ready{mostly}"
    yield Finding("exposed", text, cost, _faster_exchange(facts, largest.name))


def _faster_exchange(facts: Facts, largest: str) -> str:
    compression = facts.option("parallel", "compression")
    if _cores_short(facts) is not None and largest in (OTHER_EXCHANGE, NEGOTIATION, EXCHANGE):
        return "ranks wait for cores, and so does the exchange: see what is said of that"
    sent = facts.communication.bytes_per_step if facts.communication else None
    if sent is not None and sent < _LITTLE_BYTES:
        return "so little is sent that it costs only its latency: more samples a step, --train.global_batch"
    smaller = f"smaller buckets begin earlier: --parallel.bucket_mib {facts.bucket_mib(0.25)}"
    if largest in (NEGOTIATION, QUEUE):
        return f"fewer, larger buckets: --parallel.bucket_mib {facts.bucket_mib(4)}"
    if largest == COPIES:
        return f"buckets are not to be fused: --parallel.bucket_mib {facts.bucket_mib(4)}"
    if largest in (TRANSFER, EXCHANGE) and compression in (None, "none"):
        return f"send less: --parallel.compression auto tries what pays; {smaller}"
    return f"{smaller}; or a faster link"


def _input(facts: Facts) -> Iterator[Finding]:
    part = facts.part("data")
    # That of a late rank by itself is told with it.
    waited = [row.parts_ms.get("data", 0.0) for row in facts.blame.ranks if row.rank not in facts.blame.late]
    cost = float(np.median(waited or [part.ms.value if part else 0.0]))
    if part is None or cost < _SHARE * facts.step_ms:
        return
    workers = facts.option("loader", "workers") or 0
    text = f"{wording.ms(cost)} ms of a step ({cost / facts.step_ms:.0%}) wait for data"
    yield Finding("input", text, cost, f"load in more processes: --loader.workers {max(1, 2 * int(workers))}")


def _collections(facts: Facts) -> Iterator[Finding]:
    table = facts.run.steps
    assert table is not None
    spent = table.parts_us.get("gc")
    if spent is None:
        return
    # A collection anywhere holds up all ranks: of each step the longest counts.
    ms = float(np.nan_to_num(spent[:, warm_up(table) :]).max(axis=0).mean()) / 1e3
    if ms >= _SHARE * facts.step_ms:
        took = f"{wording.ms(ms)} ms of a step ({ms / facts.step_ms:.0%})"
        text = f"Python's garbage collector takes {took} on the slowest rank"
        yield Finding("gc", text, ms, "call gc.freeze() once model and data are made, or make fewer objects a step")


def _aside(facts: Facts) -> Iterator[Finding]:
    part = facts.part(ASIDE)
    if part is None or part.share < _ASIDE_SHARE:
        return
    every = facts.option("train", "eval_every") or facts.option("checkpoint", "every") or 50
    advice = f"less often: --train.eval_every {10 * int(every)} --checkpoint.every {10 * int(every)}"
    advice += ", or fewer samples: --train.eval_samples 16"
    yield Finding("aside", f"evaluations and checkpoints take {part.share:.0%} of the time", part.ms.value, advice)


def _cores_short(facts: Facts) -> float | None:
    """What every rank waited for a core, in ms a step; None where it is little or not known."""
    table = facts.run.steps
    if table is None or not facts.step_ms:
        return None
    rows = [row for block in table.facts if (row := block.get("cpu_wait_us")) and None not in row]
    if not rows:
        return None
    counted = [int(np.sum(table.block == number)) for number in np.unique(table.block)][-len(rows) :]
    waited = float(np.median(np.sum(np.array(rows, float), axis=0))) / 1e3 / max(1, sum(counted))
    return waited if waited >= _CPU_SHARE * facts.step_ms else None


def _cores(facts: Facts) -> Iterator[Finding]:
    if (waited := _cores_short(facts)) is not None:
        took = f"{wording.ms(waited)} ms a step ({waited / facts.step_ms:.0%})"
        text = f"ranks were ready to run and had no core for {took}"
        advice = "end what else runs on these hosts, or start fewer threads and ranks there: OMP_NUM_THREADS=1"
        if facts.option("loader", "workers"):
            advice += ", --loader.workers 0"
        yield Finding("cpu", text, waited, advice)


def _bandwidth(facts: Facts) -> Iterator[Finding]:
    found = facts.communication
    if found is None or found.bus_gb_per_s is None or found.link_gb_per_s is None:
        return
    transfer = facts.part(TRANSFER)
    if found.bytes_per_step is None or found.bytes_per_step < _LITTLE_BYTES:
        return
    if found.bus_gb_per_s < _SLOW_BUS * found.link_gb_per_s and transfer and transfer.share >= _SHARE:
        alone = wording.speed(found.link_gb_per_s)
        text = f"sums travel at {wording.speed(found.bus_gb_per_s)}, a large one by itself at {alone}"
        won = transfer.ms.value * (1 - found.bus_gb_per_s / found.link_gb_per_s)
        advice = "small buckets or cores that backward needs: --parallel.bucket_mib "
        yield Finding("bandwidth", text, won, advice + facts.bucket_mib(4))


def _stalls(facts: Facts) -> Iterator[Finding]:
    lines = [line for line in facts.run.warnings if line.startswith(STALLED)]
    if lines:
        more = f"; and on {len(lines) - 1} more rank(s)" if len(lines) > 1 else ""
        text = f"{lines[0][:160]}{more}"
        yield Finding("stall", text, None, "ranks must call the same collectives; see which ranks it names as missing")


def _ms(estimate: Estimate) -> str:
    return f"{wording.ms(estimate.value)} ms {wording.interval(estimate)}"


def _seconds(ms: float) -> str:
    return f"{wording.ms(ms / 1e3)} s" if ms >= 1000 else f"{wording.ms(ms)} ms"
