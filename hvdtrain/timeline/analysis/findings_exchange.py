"""Findings about the exchange of gradients and parameters, with what to try. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.compression.table import auto_candidates
from hvdtrain.config.sync import AUTO_SYNC
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Finding
from hvdtrain.timeline.analysis.budget import ACTIVATIONS, EXCHANGE, LATE, OTHER_EXCHANGE, PARAMETERS
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.analysis.phases import COPIES, NEGOTIATION, QUEUE, TRANSFER
from hvdtrain.timeline.whatif.evidence import Change
from hvdtrain.timeline.whatif.predict import choose_compression, nothing_measured

_SHARE = 0.02
"""Share of a step: smaller costs are not reported."""
LITTLE_BYTES = 1 << 20
"""A step that sends less is bound by latency."""
_SLOW_BUS = 0.5
_MOST = 0.5
"""Share of a step: a costlier exchange should be rarer."""


def exchange_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings of a run with stamps: exposed communication, and a bus that is slower than its link."""
    yield from _exposed(facts)
    yield from _bandwidth(facts)


def _exposed(facts: Facts) -> Iterator[Finding]:
    """Report exposed communication, without the waits for stragglers and for activations."""
    assert facts.budget is not None
    pieces = [p for p in facts.budget.parts if p.name in facts.budget.exposed and p.name not in (LATE, ACTIVATIONS)]
    costs = {piece.name: piece.ms.value for piece in pieces}
    if facts.blame.late and PARAMETERS in costs:  # the others wait for a straggler in each block
        costs[PARAMETERS] = min(row.parts_ms.get(PARAMETERS, 0.0) for row in facts.blame.ranks)
    cost = sum(costs.values())
    if cost < _SHARE * facts.step_ms:
        return
    largest = max(costs, key=lambda name: costs[name])
    mostly = f", mostly {largest}" if len(pieces) > 1 else ""
    text = f"exposed communication takes {facts.per_step(cost)}{mostly}"
    yield Finding("exposed", text, cost, _faster_exchange(facts, largest, cost))


def _faster_exchange(facts: Facts, largest: str, cost_ms: float) -> str:
    if facts.cores_explain(cost_ms) and largest in (OTHER_EXCHANGE, NEGOTIATION, EXCHANGE):
        return f"the exchange waits for CPU cores: {facts.for_cores()}"
    sent = facts.communication.bytes_per_step if facts.communication else None
    if sent is not None and sent < LITTLE_BYTES:
        return f"latency dominates because little is sent: {_more_samples(facts) or 'fewer ranks'}"
    if largest in (NEGOTIATION, QUEUE) and (larger := _buckets(facts, 4, "fewer, larger buckets", cost_ms)):
        return larger
    if largest in (NEGOTIATION, QUEUE) and (more := _more_samples(facts)):
        return f"exchange less often: {more}"
    if largest == COPIES and (larger := _buckets(facts, 4, "larger buckets need no fusion", cost_ms)):
        return larger
    less = _less(facts, cost_ms) if largest in (TRANSFER, EXCHANGE, PARAMETERS) else ""
    tries = [each for each in (less, _buckets(facts, 0.25, "smaller buckets start earlier", cost_ms)) if each]
    if less:
        return "; ".join(tries)
    if cost_ms > _MOST * facts.step_ms and facts.may_train_apart():
        tries.append(f"compare rarer exchanges: `hvdtrain timeline whatif {facts.run.path} --sync {AUTO_SYNC}`")
    if tries:
        return "; ".join([*tries, "or a faster link"])
    return "; or ".join(filter(None, ["a faster link", _more_samples(facts)]))


def _less(facts: Facts, cost_ms: float) -> str:
    """Return advice to compress; empty if the run does, or if that does not pay."""
    if facts.option("parallel", "compression") not in (None, "none"):
        return ""
    if facts.has_other_engine():
        return facts.confirmed("send less: --parallel.compression bf16", Change(compression="bf16"), cost_ms)
    advice, evidence = "send less: --parallel.compression auto finds what pays off", facts.evidence
    if evidence is None:
        return advice
    best, _ = choose_compression(evidence, auto_candidates(), nothing_measured)
    return facts.confirmed(advice, Change(compression=best), cost_ms) if best != "none" else ""


def _buckets(facts: Facts, factor: float, why: str, cost_ms: float) -> str:
    """Return advice for buckets `factor` times as large; empty if that changes nothing."""
    mib = facts.bucket_mib(factor)
    return facts.confirmed(f"{why}: --parallel.bucket_mib {mib:g}", Change(bucket_mib=mib), cost_ms) if mib else ""


def _more_samples(facts: Facts) -> str:
    batch = facts.option("train", "global_batch")
    twice = Change(global_batch=2 * batch) if isinstance(batch, int) else Change()
    return facts.confirmed(
        f"more samples per step, --train.global_batch{f' {2 * batch}' if facts.evidence else ''}", twice
    )


def _bandwidth(facts: Facts) -> Iterator[Finding]:
    found = facts.communication
    if found is None or found.bus_gb_per_s is None or found.link_gb_per_s is None:
        return
    transfer = facts.part(TRANSFER)
    if found.bytes_per_step is None or found.bytes_per_step < LITTLE_BYTES:
        return
    if found.bus_gb_per_s < _SLOW_BUS * found.link_gb_per_s and transfer and transfer.share >= _SHARE:
        alone = wording.speed(found.link_gb_per_s)
        text = f"bus bandwidth is {wording.speed(found.bus_gb_per_s)}; a large allreduce alone reaches {alone}"
        gain = transfer.ms.value * (1 - found.bus_gb_per_s / found.link_gb_per_s)
        advice = (
            _buckets(facts, 4, "use larger buckets, or free CPU cores", gain) or "backward needs the same CPU cores"
        )
        yield Finding("bandwidth", text, gain, advice)
