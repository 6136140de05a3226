"""A job made into a step that can be replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.compression.table import Compression, parse
from hvdtrain.timeline.whatif.bucket_plan import Gradient, Planned, planned
from hvdtrain.timeline.whatif.coding import COPY_S_PER_BYTE, Cost, estimated
from hvdtrain.timeline.whatif.evidence import Evidence, Job
from hvdtrain.timeline.whatif.links import Algorithm, Link, collective_s
from hvdtrain.timeline.whatif.replay import Arrival, Collective, Exchange, Step

Costs = Callable[[Compression, Planned, int], Cost | None]
"""What was measured of coding a bucket of so many ranks; None where nobody has."""


@dataclass(frozen=True)
class Setting:
    """What a step is assembled by.

    Attributes:
        job: how it is made.
        link: by which it exchanges.
        algorithm: of allreduces.
        full: whether the exchange takes from the core that computes.
        data_s: of loading a step's batches; None as measured.
        slower: of computing on the slowest rank, over what was measured.
        coding: of what coding costs.
    """

    job: Job
    link: Link
    algorithm: Algorithm = "auto"
    full: bool = False
    data_s: float | None = None
    slower: float = 1.0
    coding: float = 1.0


@dataclass(frozen=True)
class Assembled:
    """A step, and what it sends.

    Attributes:
        step: to be replayed.
        buckets: in the order of their gradients.
        handed_bytes: that a rank hands to collectives.
        measured: whether coding was measured, not estimated.
    """

    step: Step
    buckets: Sequence[Planned]
    handed_bytes: float
    measured: bool


def buckets_of(evidence: Evidence, job: Job) -> list[Planned]:
    """What would travel together."""
    compression = parse(job.compression)
    limit = (
        int(job.bucket_mib * (1 << 20)) if job.bucket_mib else compression.bucket_bytes(one_host=job.ranks.hosts == 1)
    )
    work = job.passes / evidence.job.passes
    return planned(evidence.gradients, limit, compression, job.ranks.size, work)


def assemble(evidence: Evidence, setting: Setting, costs: Costs) -> Assembled:
    """Make the step, backward as it was seen in early steps.

    Args:
        evidence: of the run.
        setting: what is changed.
        costs: of coding, where measured.
    """
    job, parts = setting.job, evidence.parts_s
    was, now = evidence.job.passes, job.passes
    slower = setting.slower
    backward_s = parts["backward"] / was
    data_s = parts["data"] * now / was if setting.data_s is None else setting.data_s
    forward_s = (parts["copy"] + parts["forward"]) / was
    before_s = data_s + slower * (now * forward_s + (now - 1) * backward_s)
    after_s = parts["clip"] + parts["optimizer"] + parts["rest"]
    if job.ranks.size == 1 and job.compression == "none":
        return Assembled(_alone(evidence, before_s, slower, after_s), [], 0.0, True)
    compression, buckets = parse(job.compression), buckets_of(evidence, job)
    of = {gradient.name: gradient for gradient in evidence.gradients}
    copy_s = evidence.copy_s_per_byte or COPY_S_PER_BYTE
    found = [None if b.rows else costs(compression, b, job.ranks.size) for b in buckets]
    known = [
        cost or _estimate(compression, bucket, of, job.ranks.size, copy_s)
        for bucket, cost in zip(buckets, found, strict=True)
    ]
    copied = compression.exact and evidence.copy_s_per_byte is not None
    measured = copied or all(cost is not None or bucket.rows for bucket, cost in zip(buckets, found, strict=True))
    known = [cost.times(setting.coding) for cost in known]
    sent = [bucket.collectives(compression, job.ranks.size) for bucket in buckets]
    exchanges = [_exchange(setting, way, cost) for way, cost in zip(sent, known, strict=True)]
    exchanges.append(_exchange(setting, [("allreduce", 0.0)], Cost([], [0.0], [0.0], 0.0, 0.0)))  # loss and weight
    step = Step(
        before_s,
        _arrivals(evidence, buckets, known, slower),
        evidence.tail_s * slower,
        exchanges,
        [*_late(buckets, known, of), 0.0],
        after_s + sum(cost.commit_s for cost in known),
    )
    return Assembled(step, buckets, sum(size for way in sent for _, size in way), measured)


def stretched(step: Step, factor: float) -> Step:
    """The same, with so many times as long between gradients."""
    arrivals = [Arrival(arrival.gap_s * factor, arrival.pack_s, arrival.bucket) for arrival in step.arrivals]
    return replace(step, arrivals=arrivals, tail_s=step.tail_s * factor)


def _alone(evidence: Evidence, before_s: float, slower: float, after_s: float) -> Step:
    last = max((g.ready_s for g in evidence.gradients if g.ready_s is not None), default=0.0)
    return Step(before_s, [], (last + evidence.tail_s) * slower, [], (), after_s)


def _estimate(compression: Compression, bucket: Planned, of: dict[str, Gradient], ranks: int, copy_s: float) -> Cost:
    sizes = [of[name].nbytes for name in bucket.names]
    if bucket.rows:  # looked for in all of it, then copied back and forth
        rows_s = copy_s * bucket.rows * sizes[0] / max(1, of[bucket.names[0]].shape[0])
        return Cost([0.0], [copy_s * sizes[0], rows_s], [0.0, 0.0], 2 * rows_s, 0.0)
    return estimated(compression, bucket.shape, sizes, ranks, copy_s)


def _exchange(setting: Setting, way: Sequence[tuple[str, float]], cost: Cost) -> Exchange:
    found = []
    parts = zip(way, [*cost.before_s, *[0.0] * len(way)], [*cost.during_s, *[0.0] * len(way)], strict=False)
    for (kind, size), before_s, during_s in parts:
        wire_s, cpu_s = collective_s(setting.link, setting.job.ranks, kind, size, setting.algorithm)
        found.append(Collective(before_s, wire_s, cpu_s if setting.full else 0.0, during_s))
    return Exchange(found, cost.after_s)


def _arrivals(evidence: Evidence, buckets: Sequence[Planned], costs: Sequence[Cost], slower: float) -> list[Arrival]:
    place = {name: (number, index) for number, b in enumerate(buckets) for index, name in enumerate(b.names)}
    found, before = [], 0.0
    for gradient in evidence.gradients:
        if gradient.ready_s is None:
            continue
        number, index = place[gradient.name]
        gap_s = max(0.0, gradient.ready_s - before)
        found.append(Arrival(gap_s * slower, costs[number].pack_s[index], number))
        before = max(before, gradient.ready_s + gradient.pack_s)
    return found


def _late(buckets: Sequence[Planned], costs: Sequence[Cost], of: dict[str, Gradient]) -> list[float]:
    return [
        math.fsum(s for name, s in zip(b.names, cost.pack_s, strict=True) if of[name].ready_s is None)
        for b, cost in zip(buckets, costs, strict=True)
    ]
