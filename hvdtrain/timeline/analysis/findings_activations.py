"""Findings about waits for the activations of other ranks: those of stages, experts and parts of sequences. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Finding
from hvdtrain.timeline.analysis.budget import ACTIVATIONS, parts_by_rank
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.columns import Floats

_IDLE = 0.05
"""Of a step, or of forward and backward: shorter waits are not reported."""
_GAIN = 0.005
"""Part of the time a sample that a change must save to be advised."""
_HALF = 0.5


def activation_findings(facts: Facts) -> Iterator[Finding]:
    """Yield findings about stages of a pipeline, and about other ranks that divide passes."""
    yield from _pipeline(facts)
    yield from _divided_passes(facts)


def _pipeline(facts: Facts) -> Iterator[Finding]:
    """Report how long the stages of a pipeline wait; if that is unknown, the least: while it fills and empties."""
    stages, size = facts.option("parallel", "pp"), facts.run.size
    batch, micro_batch = facts.option("train", "global_batch"), facts.option("train", "micro_batch")
    tp, cp, chunks = (facts.option("parallel", name) or 1 for name in ("tp", "cp", "virtual_stages"))
    if (
        not all(isinstance(each, int) and each > 0 for each in (stages, batch, micro_batch, tp, cp, chunks))
        or stages < 2
    ):
        return
    later = facts.option("parallel", "zero_bubble") is True
    dimensions = Dimensions(tp=tp, cp=cp, pp=stages, virtual_stages=chunks, zero_bubble=later)
    every = -(-batch // micro_batch)
    passes, share = dimensions.own_passes(size, every), dimensions.bubble(size, every)
    least = f"at least {share:.0%} of forward and backward with {passes} micro-batches"
    advice = []

    def advise(change: str, share_then: float) -> None:
        if (gain := 1 - (1 - share) / (1 - share_then)) >= _GAIN:
            advice.append(f"{change} up to {gain:.0%} less time a sample")

    smaller = "a smaller --train.micro_batch, or " if micro_batch > 1 else ""
    more = f"more micro-batches: {smaller}a larger --train.global_batch; with twice as many,"
    advise(more, dimensions.bubble(size, 2 * every))
    by_fsdp = facts.option("parallel", "engine") == "fsdp"  # without zero bubble and virtual stages
    if not (later or by_fsdp or facts.option("train", "compile")):  # nor is it for compiled blocks
        advise("--parallel.zero_bubble true:", replace(dimensions, zero_bubble=True).bubble(size, every))
    waits = _waits_for_activations(facts)
    if waits is not None:
        cost = float(waits.mean())
        text = f"the {stages} stages of a pipeline wait for each other for {facts.per_step(cost)}; {least}"
        by_stage = np.array([waits[np.arange(size) * stages // size == stage].mean() for stage in range(stages)])
        is_known = facts.run.steps is not None and facts.run.steps.stages == stages  # older runs had another order
        if is_known and by_stage.max() - by_stage.min() >= _HALF * cost:
            text += f". Stage {by_stage.argmin()} waits least, {wording.ms(by_stage.min())} ms: it has the most work"
    elif share >= _IDLE:
        cost = share * sum(part.ms.value for name in ("forward", "backward") if (part := facts.part(name)) is not None)
        text = f"the {stages} stages of a pipeline wait for each other: {least}"
        if not by_fsdp:  # on CPUs, they make steps longer
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
    part, table = facts.part(ACTIVATIONS), facts.run.steps
    if part is None or table is None or part.share < _IDLE:
        return None
    return parts_by_rank(table)[ACTIVATIONS]
