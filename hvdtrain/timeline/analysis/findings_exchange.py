"""Findings about exchanges: of gradients and parameters, and of the activations of other ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.compression.sizes import ITEM_BYTES
from hvdtrain.compression.table import auto_candidates
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Finding
from hvdtrain.timeline.analysis.budget import ACTIVATIONS, EXCHANGE, OTHER_EXCHANGE, PARAMETERS, parts_by_rank
from hvdtrain.timeline.analysis.inputs import LEAST_SHARE, Facts
from hvdtrain.timeline.analysis.phases import COPIES, NEGOTIATION, QUEUE, TRANSFER
from hvdtrain.timeline.columns import Floats
from hvdtrain.timeline.whatif.evidence import Change
from hvdtrain.timeline.whatif.predict import choose_compression, nothing_measured

_LEAST_MIB, _USUAL_MIB, _MOST_MIB = 0.25, 32.0, 256.0
LITTLE_BYTES = 1 << 20
"""A step that sends less is bound by latency."""
_SLOW_BUS = 0.5
_MOST = 0.5
"""Share of a step: a costlier exchange should be rarer."""


def _exposed(facts: Facts) -> Iterator[Finding]:
    """Report exposed communication, without that of activations, which has a finding of its own."""
    assert facts.budget is not None
    pieces = [part for part in facts.budget.exposed_parts if part.name != ACTIVATIONS]
    costs = {piece.name: piece.ms.value for piece in pieces}
    if facts.blame.late and PARAMETERS in costs:  # the others wait for a straggler in each block
        costs[PARAMETERS] = min(row.parts_ms.get(PARAMETERS, 0.0) for row in facts.blame.ranks)
    cost = sum(costs.values())
    if cost < LEAST_SHARE * facts.step_ms:
        return
    largest = max(costs, key=lambda name: costs[name])
    mostly = f", mostly {largest}" if len(pieces) > 1 else ""
    besides = " besides that of activations" if len(pieces) < len(facts.budget.exposed_parts) else ""
    took = facts.per_step(sum(piece.ms.value for piece in pieces))
    text = f"exposed communication{besides} takes {took}{mostly}"
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
        workers = next((count for count in range(2, facts.run.size) if facts.run.size % count == 0), facts.run.size)
        change = f"--sync diloco:32 --workers {workers}"
        tries.append(f"compare rarer exchanges: `hvdtrain timeline whatif {facts.run.path} {change}`")
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
    """Return advice for buckets `factor` times as large; empty if that changes nothing.

    The current size is that of the largest bucket, or the option if that is smaller.
    """
    buckets = [bucket for spans in facts.run.spans for bucket in spans.buckets.values()]
    has_one = max((len(spans.buckets) for spans in facts.run.spans), default=0) == 1
    has_none = facts.option("parallel", "engine") == "fsdp" and not facts.option("parallel", "dp_shard")
    if has_none or (factor > 1 and has_one):
        return ""
    size = max((bucket.length * ITEM_BYTES.get(bucket.dtype, 4) for bucket in buckets), default=0) / (1 << 20)
    asked = facts.option("parallel", "bucket_mib")
    if isinstance(asked, (int, float)) and asked > 0:
        size = min(size or math.inf, asked)
    size = size or _USUAL_MIB
    mib = max(_LEAST_MIB, min(_MOST_MIB, 2.0 ** round(math.log2(size * factor))))
    if (mib - size) * (factor - 1) <= 0:
        return ""
    return facts.confirmed(f"{why}: --parallel.bucket_mib {mib:g}", Change(bucket_mib=mib), cost_ms)


def _more_samples(facts: Facts) -> str:
    batch = facts.option("train", "global_batch")
    twice = Change(global_batch=2 * batch) if isinstance(batch, int) else Change()
    text = f"more samples per step, --train.global_batch{f' {2 * batch}' if facts.evidence else ''}"
    return facts.confirmed(text, twice)


def _bandwidth(facts: Facts) -> Iterator[Finding]:
    found = facts.communication
    if found is None or found.bus_gb_per_s is None or found.link_gb_per_s is None:
        return
    if found.bytes_per_step is None or found.bytes_per_step < LITTLE_BYTES:
        return
    if found.bus_gb_per_s < _SLOW_BUS * found.link_gb_per_s and facts.share(TRANSFER) >= LEAST_SHARE:
        alone = wording.speed(found.link_gb_per_s)
        text = f"bus bandwidth is {wording.speed(found.bus_gb_per_s)}; a large allreduce alone reaches {alone}"
        gain = facts.ms(TRANSFER) * (1 - found.bus_gb_per_s / found.link_gb_per_s)
        advice = _buckets(facts, 4, "use larger buckets, or free CPU cores", gain)
        yield Finding("bandwidth", text, gain, advice or "backward needs the same CPU cores")


_IDLE = 0.05
"""Of a step, or of forward and backward: shorter waits are not reported."""
_GAIN = 0.005
"""Part of the time a sample that a change must save to be advised."""
_HALF = 0.5


def _pipeline(facts: Facts) -> Iterator[Finding]:
    """Report how long the stages of a pipeline wait; if that is unknown, the least: while it fills and empties."""
    stages, size = facts.option("parallel", "pp"), facts.run.size
    batch, micro_batch = facts.option("train", "global_batch"), facts.option("train", "micro_batch")
    tp, cp, chunks = (facts.option("parallel", name) or 1 for name in ("tp", "cp", "virtual_stages"))
    numbers = (stages, batch, micro_batch, tp, cp, chunks)
    if not all(isinstance(each, int) and each > 0 for each in numbers) or stages < 2:
        return
    dimensions = Dimensions(tp=tp, cp=cp, pp=stages, virtual_stages=chunks)
    every = -(-batch // micro_batch)
    passes, share = dimensions.own_passes(size, every), dimensions.bubble(size, every)
    least = f"at least {share:.0%} of forward and backward with {passes} micro-batches"
    advice = []
    smaller = "a smaller --train.micro_batch, or " if micro_batch > 1 else ""
    more = f"more micro-batches: {smaller}a larger --train.global_batch; with twice as many,"
    if (gain := 1 - (1 - share) / (1 - dimensions.bubble(size, 2 * every))) >= _GAIN:
        advice.append(f"{more} up to {gain:.0%} less time a sample")
    waits = _waits_for_activations(facts)
    if waits is not None:
        cost = float(waits.mean())
        text = f"the {stages} stages of a pipeline wait for each other for {facts.per_step(cost)}; {least}"
        of_stage = np.array([waits[np.arange(size) * stages // size == stage].mean() for stage in range(stages)])
        if of_stage.max() - (ms := of_stage.min()) >= _HALF * cost:
            text += f". Stage {of_stage.argmin()} waits least, {wording.ms(ms)} ms: it has the most work, or is slow"
    elif share >= _IDLE:
        cost = share * facts.ms("forward", "backward")
        text = f"the {stages} stages of a pipeline wait for each other: {least}"
        if facts.option("parallel", "engine") != "fsdp":  # on CPUs, they make steps longer
            advice.append(f"more --parallel.virtual_stages than {chunks}")
    else:
        return
    yield Finding("pipeline", text, cost, "; or ".join(advice) or "find out what slows the stage that waits least")


def _divided_passes(facts: Facts) -> Iterator[Finding]:
    """Report how long ranks that divide experts or sequences wait for activations, and for which rank."""
    waits = _waits_for_activations(facts)
    if waits is None or (facts.option("parallel", "pp") or 1) > 1:
        return
    cost, least = float(waits.mean()), int(waits.argmin())
    text = f"ranks wait for activations of other ranks for {facts.per_step(cost)}"
    advice = "a faster link, or fewer ranks that divide the experts or the sequences"
    if cost - waits[least] >= _HALF * cost:
        assert facts.run.steps is not None
        who = wording.ranks([least], facts.run.steps.hosts)
        text += f"; {who} waits least, for {wording.ms(waits[least])} ms: the others wait for it"
        advice = f"find out what slows {who}: more tokens for its experts, or its host"
    yield Finding("activations", text, cost, advice)


def _waits_for_activations(facts: Facts) -> Floats | None:
    """Return the mean wait of each rank in a step, ms; None if it is short or not measured."""
    if facts.run.steps is None or facts.share(ACTIVATIONS) < _IDLE:
        return None
    return parts_by_rank(facts.run.steps)[ACTIVATIONS]


RULES_OF_EXCHANGES = (_exposed, _bandwidth)
"""Of a run with stamps: exposed communication, and a bus that is slower than its link."""
RULES_OF_ACTIVATIONS = (_pipeline, _divided_passes)
