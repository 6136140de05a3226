"""The passes of a step of an engine that divides the update: its gathers, and the work that needs them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from hvdtrain.plan.collectives import AT_ONCE, PlannedBucket, bucket_limit
from hvdtrain.timeline.whatif.evidence import Evidence, Job
from hvdtrain.timeline.whatif.links import Link, collective_s
from hvdtrain.timeline.whatif.replay import Exchange, Part, Step

Gather = Callable[[PlannedBucket], Exchange]
"""The gather of the parameters of a bucket."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds to load the data of a step, and of forward in each of its passes."""

    data_s: float
    forward_s: float
    count: int

    @property
    def before_s(self) -> float:
        """Seconds of a step's data and forward passes."""
        return self.data_s + self.count * self.forward_s


def arrange_passes(
    step: Step, evidence: Evidence, job: Job, buckets: Sequence[PlannedBucket], times: PassTimes, gather: Gather
) -> Step:
    """Return the step of a job's engine from the last backward pass, exchange and update in `step`.

    The last of its exchanges is that of the loss.
    """
    if job.plan.engine == "fsdp":
        return _fsdp(step, evidence, buckets, times, gather)
    if job.plan.shard != "none":
        return _sharded(step, evidence, job, buckets, times, gather)
    return replace(step, before_s=times.before_s, repeats=times.count - 1)


def update_s(evidence: Evidence, job: Job, link: Link) -> float:
    """Return the seconds to clip and to update.

    Ranks that divide the update share both, and sum the norm over all ranks. Where they did so in the run, clipping is
    left as it was: most of it is the wait for other ranks.
    """
    was, parts = evidence.job, evidence.parts_s
    clip_s = parts["clip"]
    if job.plan.shard != "none" and was.plan.shard == "none":
        clip_s = clip_s / job.sharers + collective_s(link, job.ranks, "allreduce", 0.0)[0]
    return clip_s + parts["optimizer"] * was.sharers / job.sharers


def engine_notes(evidence: Evidence, job: Job) -> Iterator[str]:
    """Yield what a prediction assumes of the job's engine."""
    was = evidence.job
    if job.plan.shard != "none":
        yield "parameters are assumed to be needed in forward at times that mirror those of backward"
    if job.sharers != was.sharers:
        yield f"{job.sharers} rank(s) share the update of the optimizer; {was.sharers} shared the measured one"
    if job.plan.engine == "fsdp":
        yield "FSDP's own work is not in the model; on CPUs, Horovod is assumed to carry its collectives"
    for name in {one.plan.compression for one in (was, job) if one.plan.engine == "ddp"} - {"none"}:
        yield f"{name} of DDP is assumed to cost and send what hvdtrain's own does"


def _sharded(
    step: Step, evidence: Evidence, job: Job, buckets: Sequence[PlannedBucket], times: PassTimes, gather: Gather
) -> Step:
    """Gather all buckets in the first forward pass; sum them in the last backward pass, or in each.

    The memory of exchanges and gathers is limited as in `engine.sharded`.
    """
    starts = _starts(evidence, times.forward_s)
    order = list(reversed(buckets))
    needed_s = [min(starts[gradient.unit] for gradient in bucket.gradients) for bucket in order]
    kept = [bucket.nbytes / job.ranks.size for bucket in buckets]
    compression = evidence.compression_of(job.plan.compression)
    limit = AT_ONCE * bucket_limit(job.plan, evidence.gradients, job.ranks, compression) + sum(kept)
    sums = [
        replace(exchange, nbytes=bucket.nbytes + own, kept_bytes=own)
        for exchange, bucket, own in zip(step.exchanges[:-1], buckets, kept, strict=True)
    ]
    step = replace(step, exchanges=[*sums, *step.exchanges[-1:]], limit_bytes=limit)
    parts = _forward_parts(needed_s, times.forward_s)
    first = replace(step, before_s=times.data_s, gathers=[gather(bucket) for bucket in order], ahead_bytes=limit)
    if not job.plan.sums_each_pass or times.count == 1:
        return replace(first, forward=[*parts, Part(0, (times.count - 1) * times.forward_s)], repeats=times.count - 1)
    first = replace(first, forward=parts, exchanges=sums, after_s=0.0)
    # The sums of the first pass are there already.
    added = [replace(exchange, kept_bytes=0.0) for exchange in sums]
    last = replace(step, exchanges=[*added, *step.exchanges[-1:]], limit_bytes=limit - sum(kept))
    more = replace(last, before_s=times.forward_s, exchanges=added, after_s=0.0)
    return replace(last, before_s=times.forward_s, earlier=[first, *[more] * (times.count - 2)])


def _fsdp(step: Step, evidence: Evidence, units: Sequence[PlannedBucket], times: PassTimes, gather: Gather) -> Step:
    """Gather each unit before its forward pass, and each block before its backward pass; sum them in each pass.

    The next gather starts in advance, and few sums are under way at a time, as in `engine.fsdp_collectives`.
    """
    starts = _starts(evidence, times.forward_s)
    blocks = {number: starts[block] for number, b in enumerate(units) if (block := b.gradients[0].block)}
    others = [number for number in range(len(units)) if number not in blocks]
    order = [*others, *sorted(blocks, key=lambda number: blocks[number])]
    of_arrivals = [arrival.bucket for arrival in step.arrivals]
    backward = [number for number in dict.fromkeys(of_arrivals) if number in blocks]
    needing = {of_arrivals.index(number) for number in backward}  # the first gradient of each block needs its gather
    arrivals = [replace(arrival, needs=int(at in needing)) for at, arrival in enumerate(step.arrivals)]
    parts = _forward_parts([blocks.get(number, 0.0) for number in order], times.forward_s)
    whole = replace(
        step,
        before_s=0.0,
        arrivals=arrivals,
        forward=parts,
        gathers=[gather(units[number]) for number in [*order, *backward]],
        ahead_bytes=0.0,
        exchanges=[*(replace(exchange, nbytes=1.0) for exchange in step.exchanges[:-1]), step.exchanges[-1]],
        limit_bytes=float(AT_ONCE),
    )
    earlier = replace(whole, exchanges=whole.exchanges[:-1], after_s=0.0)
    passes = [earlier] * (times.count - 1) + [whole]
    passes[0] = replace(passes[0], before_s=times.data_s)
    return replace(passes[-1], earlier=passes[:-1])


def _starts(evidence: Evidence, forward_s: float) -> dict[str, float]:
    """Return when the forward pass reaches each unit: it is assumed to mirror backward."""
    end_s = evidence.tail_s + max((g.ready_s for g in evidence.gradients if g.ready_s is not None), default=0.0)
    ready: dict[str, float] = {}
    for gradient in evidence.gradients:
        ready[gradient.unit] = max(ready.get(gradient.unit, 0.0), gradient.ready_s or 0.0)
    return {unit: forward_s * (1 - at_s / end_s) if end_s else 0.0 for unit, at_s in ready.items()}


def _forward_parts(needed_s: Sequence[float], forward_s: float) -> list[Part]:
    """Return the parts of a forward pass that needs gathers, which end in their order, at these times."""
    ends = list(accumulate(reversed(needed_s), min, initial=forward_s))[::-1]
    return [Part(0, ends[0]), *(Part(1, end - begin) for begin, end in pairwise(ends))]
