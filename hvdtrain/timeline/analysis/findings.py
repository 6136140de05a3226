"""The findings of a run: problems, each with its number, its cost and what to try. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Finding
from hvdtrain.timeline.analysis.budget import ASIDE, EXCHANGE, LATE, OTHER_EXCHANGE
from hvdtrain.timeline.analysis.findings_horovod import timeline_findings
from hvdtrain.timeline.analysis.findings_ranks import rank_findings
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.analysis.phases import COPIES, NEGOTIATION, QUEUE, TRANSFER
from hvdtrain.timeline.analysis.rank_steps import warm_up
from hvdtrain.timeline.logs import STALLED

_SHARE = 0.02
"""Share of a step: smaller costs are not reported."""
_ASIDE_SHARE = 0.1
_SLOW_BUS = 0.5
_LITTLE_BYTES = 1 << 20
_MORE_SAMPLES = "more samples per step, --train.global_batch"


def find(facts: Facts) -> list[Finding]:
    """Return all findings, most costly first; unknown costs last."""
    found = [*rank_findings(facts), *_stalls(facts)]
    if facts.run.steps is not None and facts.budget is not None:
        for rule in (_exposed, _input, _copies, _collections, _aside, _cores, _bandwidth):
            found += rule(facts)
    elif facts.budget is not None:
        found += timeline_findings(facts.run, facts.budget, facts.communication, ticks=facts.blame.source == "ticks")
    return sorted(found, key=lambda finding: -(finding.cost_ms or 0.0))


def _exposed(facts: Facts) -> Iterator[Finding]:
    """Report exposed communication, without the wait for stragglers."""
    assert facts.budget is not None
    pieces = [p for p in facts.budget.parts if p.name in facts.budget.exposed and p.name != LATE]
    cost = sum(piece.ms.value for piece in pieces)
    if cost < _SHARE * facts.step_ms:
        return
    largest = max(pieces, key=lambda piece: piece.ms.value)
    share = cost / facts.step_ms
    mostly = f", mostly {largest.name}" if len(pieces) > 1 else ""
    text = f"exposed communication takes {wording.ms(cost)} ms per step ({share:.0%}){mostly}"
    yield Finding("exposed", text, cost, _faster_exchange(facts, largest.name, cost))


def _faster_exchange(facts: Facts, largest: str, cost_ms: float) -> str:
    compression = facts.option("parallel", "compression")
    if facts.cores_explain(cost_ms) and largest in (OTHER_EXCHANGE, NEGOTIATION, EXCHANGE):
        return f"the exchange waits for CPU cores: {facts.for_cores()}"
    sent = facts.communication.bytes_per_step if facts.communication else None
    if sent is not None and sent < _LITTLE_BYTES:
        return f"latency dominates because little is sent: {_MORE_SAMPLES}"
    larger = facts.bucket_mib(4)
    if largest in (NEGOTIATION, QUEUE):
        return f"fewer, larger buckets: {larger}" if larger else f"exchange less often: {_MORE_SAMPLES}"
    if largest == COPIES and larger:
        return f"larger buckets need no fusion: {larger}"
    smaller = facts.bucket_mib(0.25)
    begin = f"smaller buckets start earlier: {smaller}; " if smaller else ""
    if largest in (TRANSFER, EXCHANGE) and compression in (None, "none"):
        return f"send less: --parallel.compression auto finds what pays off; {begin}".removesuffix("; ")
    return f"{begin}or a faster link" if begin else f"a faster link; or {_MORE_SAMPLES}"


def _input(facts: Facts) -> Iterator[Finding]:
    cost = _fed_ms(facts) * (1 - _copied_share(facts))
    if cost < _SHARE * facts.step_ms:
        return
    workers = facts.option("loader", "workers") or 0
    text = f"{wording.ms(cost)} ms per step ({cost / facts.step_ms:.0%}) are spent waiting for data"
    yield Finding("input", text, cost, f"use more loader processes: --loader.workers {max(1, 2 * int(workers))}")


def _copies(facts: Facts) -> Iterator[Finding]:
    cost = _fed_ms(facts) * _copied_share(facts)
    if cost < _SHARE * facts.step_ms:
        return
    text = f"{wording.ms(cost)} ms per step ({cost / facts.step_ms:.0%}) are spent copying batches to the device"
    advice = "copy fewer bytes: send integers or half precision, and convert them on the device"
    if facts.option("loader", "pin_memory") == "off":
        advice = "copy from page-locked memory, which does not block: --loader.pin_memory auto"
    yield Finding("copy", text, cost, advice)


def _fed_ms(facts: Facts) -> float:
    """Return the median wait for data and its copy to the device; stragglers are reported on their own."""
    part = facts.part("data")
    waited = [row.parts_ms.get("data", 0.0) for row in facts.blame.ranks if row.rank not in facts.blame.late]
    return float(np.median(waited or [part.ms.value])) if part else 0.0


def _copied_share(facts: Facts) -> float:
    """Return the share of the copy in that wait, of ranks that are no stragglers."""
    table = facts.run.steps
    assert table is not None
    usual = [rank for rank in range(len(table.hosts)) if rank not in facts.blame.late]
    spent = {
        name: float(np.nansum(values[usual, warm_up(table) :]))
        for name in ("data", "copy")
        if (values := table.parts_us.get(name)) is not None
    }
    whole = sum(spent.values())
    return spent.get("copy", 0.0) / whole if whole > 0 else 0.0


def _collections(facts: Facts) -> Iterator[Finding]:
    table = facts.run.steps
    assert table is not None
    spent = table.parts_us.get("gc")
    if spent is None:
        return
    # A collection on any rank delays all: the longest of each step counts.
    ms = float(np.nan_to_num(spent[:, warm_up(table) :]).max(axis=0).mean()) / 1e3
    if ms >= _SHARE * facts.step_ms:
        took = f"{wording.ms(ms)} ms per step ({ms / facts.step_ms:.0%})"
        text = f"Python's garbage collector takes {took} on the slowest rank"
        yield Finding(
            "gc", text, ms, "call gc.freeze() after creating model and data, or create fewer objects per step"
        )


def _aside(facts: Facts) -> Iterator[Finding]:
    part = facts.part(ASIDE)
    if part is None or part.share < _ASIDE_SHARE:
        return
    every = facts.option("train", "eval_every") or facts.option("checkpoint", "every") or 50
    advice = f"run them less often: --train.eval_every {10 * int(every)} --checkpoint.every {10 * int(every)}"
    advice += ", or fewer samples: --train.eval_samples 16"
    yield Finding("aside", f"evaluations and checkpoints take {part.share:.0%} of the time", part.ms.value, advice)


def _cores(facts: Facts) -> Iterator[Finding]:
    if (waited := facts.core_wait_ms()) is not None:
        took = f"{wording.ms(waited)} ms per step ({waited / facts.step_ms:.0%})"
        text = f"ranks waited for a CPU core for {took}"
        yield Finding("cpu", text, waited, facts.for_cores())


def _bandwidth(facts: Facts) -> Iterator[Finding]:
    found = facts.communication
    if found is None or found.bus_gb_per_s is None or found.link_gb_per_s is None:
        return
    transfer = facts.part(TRANSFER)
    if found.bytes_per_step is None or found.bytes_per_step < _LITTLE_BYTES:
        return
    if found.bus_gb_per_s < _SLOW_BUS * found.link_gb_per_s and transfer and transfer.share >= _SHARE:
        alone = wording.speed(found.link_gb_per_s)
        text = f"bus bandwidth is {wording.speed(found.bus_gb_per_s)}; a large allreduce alone reaches {alone}"
        gain = transfer.ms.value * (1 - found.bus_gb_per_s / found.link_gb_per_s)
        larger = facts.bucket_mib(4)
        advice = f"use larger buckets, or free CPU cores: {larger}" if larger else "backward needs the same CPU cores"
        yield Finding("bandwidth", text, gain, advice)


def _stalls(facts: Facts) -> Iterator[Finding]:
    lines = [line for line in facts.run.warnings if line.startswith(STALLED)]
    if lines:
        more = f"; and on {wording.counted(len(lines) - 1, 'more rank')}" if len(lines) > 1 else ""
        text = f"{lines[0][:160]}{more}"
        yield Finding("stall", text, None, "all ranks must call the same collectives; the line names the missing ranks")
