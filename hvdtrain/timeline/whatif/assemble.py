"""Assemble a step that can be replayed from a run's measurements, a job's settings and a change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hvdtrain.compression.coding_cost import COPY_S_PER_BYTE, CodingCost
from hvdtrain.compression.table import Compression
from hvdtrain.plan.collectives import PlannedBucket, exchanged, sums
from hvdtrain.plan.gradients import finished
from hvdtrain.timeline.whatif.engine_passes import PassTimes, arrange_passes, update_s
from hvdtrain.timeline.whatif.evidence import Change, Evidence, Job
from hvdtrain.timeline.whatif.links import Link, collective_s
from hvdtrain.timeline.whatif.replay import Arrival, Collective, Exchange, Step

Costs = Callable[[Compression, PlannedBucket, int], CodingCost | None]
"""The measured cost of coding a bucket, by compression, bucket and world size; None if it was not measured."""

_COLD = 2.0
"""What is gathered is not in the caches: time to copy it, relative to a gradient that was just written."""


@dataclass(frozen=True)
class AssembledStep:
    """A step, its buckets in the order of their gradients, and the bytes that a rank hands to collectives.

    `coding_measured`: whether the cost of coding was measured, not estimated.
    """

    step: Step
    buckets: Sequence[PlannedBucket]
    payload_bytes: float
    coding_measured: bool


def assemble_step(
    evidence: Evidence, job: Job, change: Change, link: Link, costs: Costs, coding_factor: float
) -> AssembledStep:
    """Assemble the step of a job after a change, with gradients ready when they were in early steps.

    `job` and `link` are those after the change. The costs of coding are multiplied by `coding_factor`.
    """
    crowded = evidence.crowding(job.ranks)
    slowdown, coding_factor = crowded * (1 + (change.slow_rank_percent or 0.0) / 100), crowded * coding_factor
    times = _pass_times(evidence, job, change, slowdown)
    after_s = crowded * (update_s(evidence, job, link) + evidence.parts_s["rest"])
    plan, size = job.plan, job.ranks.size
    if size == 1 and plan.compression == "none":
        last_s = max((g.ready_s for g in evidence.gradients if g.ready_s is not None), default=0.0)
        step = Step(times.before_s, [], (last_s + evidence.tail_s) * slowdown, [], (), after_s, repeats=times.count - 1)
        return AssembledStep(step, [], 0.0, True)
    compression, buckets = evidence.compression_of(plan.compression), evidence.buckets_of(job)
    coding, all_measured = _coding(evidence, job, buckets, costs, coding_factor)

    def seconds_of(kind: str, nbytes: float, summed_by: float = 1.0) -> tuple[float, float]:
        """Return the seconds of a collective, and the processor seconds that it takes from computing."""
        wire_s, cpu_s = collective_s(link, plan.summing(job.ranks, summed_by), kind, nbytes, change.algorithm or "auto")
        wire_s *= crowded if job.ranks.hosts == 1 else 1.0  # cores copy the bytes
        return wire_s, min(crowded * cpu_s, wire_s) if evidence.cores_are_full(job.ranks) else 0.0

    def gather(bucket: PlannedBucket) -> Exchange:
        """Copy this rank's part out, and the parts of the others to the parameters; FSDP copies all of them."""
        shared = 1.0 if plan.engine == "fsdp" else (size - 1) / size
        copy = coding_factor * _COLD * (evidence.copy_s_per_byte or COPY_S_PER_BYTE) * bucket.nbytes
        wire_s, cpu_s = seconds_of("allgather", bucket.nbytes / size)
        return Exchange([Collective(copy / size, wire_s, cpu_s)], copy * shared, bucket.nbytes * (size + 1) / size)

    exchanges = [
        _exchange(sums(plan, bucket, job.ranks, compression), cost, partial(seconds_of, summed_by=bucket.summed_by))
        for cost, bucket in zip(coding, buckets, strict=True)
    ]
    exchanges.append(_exchange([("allreduce", 0.0)], CodingCost([], [], [], 0.0, 0.0), seconds_of))  # loss and weight
    arrivals, tail_s = _arrivals(evidence, buckets, coding, slowdown)
    after_s += sum(cost.commit_s for cost in coding)
    last = Step(0.0, arrivals, tail_s, exchanges, [*_late(buckets, coding), 0.0], after_s)
    step = arrange_passes(last, evidence, job, buckets, times, gather)
    sent = exchanged(plan, buckets, job.ranks, job.passes, compression)
    return AssembledStep(step, buckets, sum(each.times * each.nbytes for each in sent), all_measured)


def _pass_times(evidence: Evidence, job: Job, change: Change, slowdown: float) -> PassTimes:
    parts, was, now = evidence.parts_s, evidence.job.passes, job.passes
    data_s = parts["data"] * now / was if change.data_ms is None else change.data_ms / 1e3
    # All that stages of a pipeline wait for each other counts as forward.
    computed_s = parts["copy"] + parts["forward"] + parts["backward"]
    forward_s = computed_s * job.pass_times / evidence.job.pass_times / now - parts["backward"] / was
    return PassTimes(data_s, slowdown * forward_s, now)


def _coding(
    evidence: Evidence, job: Job, buckets: Sequence[PlannedBucket], costs: Costs, factor: float
) -> tuple[list[CodingCost], bool]:
    """Return the cost of coding each bucket, and whether all of it was measured."""
    compression, ranks = evidence.compression_of(job.plan.compression), job.ranks
    copy_s = evidence.copy_s_per_byte or COPY_S_PER_BYTE
    measured = [None if bucket.rows else costs(compression, bucket, ranks.size) for bucket in buckets]
    found = [
        (cost or _estimate(compression, bucket, job.plan.summing(ranks, bucket.summed_by).size, copy_s)).scaled(factor)
        for bucket, cost in zip(buckets, measured, strict=True)
    ]
    copied = compression.exact and evidence.copy_s_per_byte is not None
    known = all(cost is not None or bucket.rows for bucket, cost in zip(buckets, measured, strict=True))
    return found, copied or known


def stretch_backward(step: Step, factor: float) -> Step:
    """Return the step with `factor` times as much time between gradients."""
    arrivals = [replace(arrival, gap_s=arrival.gap_s * factor) for arrival in step.arrivals]
    earlier = [stretch_backward(one, factor) for one in step.earlier]
    return replace(step, arrivals=arrivals, tail_s=step.tail_s * factor, earlier=earlier)


def _estimate(compression: Compression, bucket: PlannedBucket, ranks: int, copy_s: float) -> CodingCost:
    sizes = [gradient.nbytes for gradient in bucket.gradients]
    if bucket.rows:  # the whole gradient is searched for them, then they are copied out and back
        rows_s = copy_s * bucket.rows * sizes[0] / max(1, bucket.gradients[0].shape[0])
        return CodingCost([0.0], [copy_s * sizes[0], rows_s], [0.0, 0.0], 2 * rows_s, 0.0)
    return compression.estimate_coding(bucket.shape, sizes, ranks, copy_s)


def _exchange(
    collectives: Sequence[tuple[str, float]], cost: CodingCost, seconds_of: Callable[[str, float], tuple[float, float]]
) -> Exchange:
    none = [0.0] * len(collectives)
    work = zip(collectives, [*cost.before_s, *none], [*cost.during_s, *none], strict=False)
    found = []
    for (kind, size), before_s, during_s in work:
        wire_s, cpu_s = seconds_of(kind, size)
        found.append(Collective(before_s, wire_s, cpu_s, during_s))
    return Exchange(found, cost.after_s)


def _arrivals(
    evidence: Evidence, buckets: Sequence[PlannedBucket], costs: Sequence[CodingCost], slowdown: float
) -> tuple[list[Arrival], float]:
    """Return the gradients that several ranks sum, and backward after the last of them."""
    place = {name: (number, index) for number, b in enumerate(buckets) for index, name in enumerate(b.names)}
    found, before, last = [], 0.0, 0.0
    for gradient in finished(evidence.gradients):
        if gradient.ready_s is None:
            continue
        last = max(last, gradient.ready_s + gradient.pack_s)
        if gradient.name not in place:
            continue
        number, index = place[gradient.name]
        gap_s = max(0.0, gradient.ready_s - before)
        found.append(Arrival(gap_s * slowdown, costs[number].pack_s[index], number))
        before = max(before, gradient.ready_s + gradient.pack_s)
    return found, (last - before + evidence.tail_s) * slowdown


def _late(buckets: Sequence[PlannedBucket], costs: Sequence[CodingCost]) -> list[float]:
    """Return, by bucket, the time to pack the gradients that backward skips."""
    return [
        math.fsum(s for gradient, s in zip(b.gradients, cost.pack_s, strict=True) if gradient.ready_s is None)
        for b, cost in zip(buckets, costs, strict=True)
    ]
