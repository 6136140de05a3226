"""The memory that a rank holds for parameters, gradients and the optimizer's state. Pure; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain.compression.sizes import ITEM_BYTES
from hvdtrain.plan.buckets import assign
from hvdtrain.plan.shards import divide
from hvdtrain.timeline.whatif.bucket_plan import Gradient
from hvdtrain.timeline.whatif.engine_buckets import bucket_limit
from hvdtrain.timeline.whatif.evidence import Evidence, Job
from hvdtrain.timeline.whatif.prediction_text import HeldBytes


def held_bytes(evidence: Evidence, job: Job) -> HeldBytes:
    """Return what a rank of a job holds for the trained parameters."""
    by_name = {gradient.name: gradient for gradient in evidence.gradients}
    trained = [by_name[name] for name in evidence.names]  # in the model's order
    whole = sum(gradient.nbytes for gradient in trained)
    if not job.is_divided:
        return HeldBytes(whole, whole, _state([(g, math.prod(g.shape)) for g in trained]))
    if job.engine == "fsdp":
        rows = [(g, math.prod(g.shape[1:]) * -(-g.shape[0] // job.ranks.size)) for g in trained]  # of rank 0
        own = sum(count * ITEM_BYTES[g.dtype] for g, count in rows)
        return HeldBytes(own, own, _state(rows))
    segments, ranks = _shards(trained, bucket_limit(evidence, job), job.ranks.size, by_element=evidence.by_element)
    states = [_state(own) for own in ranks]
    adds_up_whole = not job.sums_each_pass and job.passes > 1
    known = [state for state in states if state is not None]
    return HeldBytes(whole, whole if adds_up_whole else segments, max(known) if len(known) == len(states) else None)


def _state(own: Sequence[tuple[Gradient, int]]) -> float | None:
    """Return the bytes of the optimizer's state for this number of elements of each parameter."""
    total = 0.0
    for gradient, count in own:
        if gradient.state_bytes is None:
            return None
        each, besides = gradient.state_bytes
        total += each * count + (besides if count else 0.0)
    return total


def _shards(
    trained: Sequence[Gradient], limit_bytes: int, ranks: int, *, by_element: bool
) -> tuple[float, list[list[tuple[Gradient, int]]]]:
    """Return the bytes of a rank's segments of all buckets, and the elements of each parameter by rank.

    The buckets are those of `engine.sharded`.
    """
    by_name = {gradient.name: gradient for gradient in trained}
    names = assign({gradient.name: (gradient.nbytes, gradient.dtype) for gradient in trained}, limit_bytes).buckets
    total = 0.0
    found: list[list[tuple[Gradient, int]]] = [[] for _ in range(ranks)]
    for number, bucket in enumerate(names):
        gradients = [by_name[name] for name in bucket]
        item = ITEM_BYTES[gradients[0].dtype]
        shapes = [gradient.shape for gradient in gradients]
        rows, segment = divide(shapes, ranks, item, [not by_element] * len(shapes), number)
        total += segment * (4 if gradients[0].dtype == "bfloat16" else item)
        for part in rows:
            gradient = gradients[part.index]
            count = (part.end - part.begin) * math.prod(gradient.shape[1:])
            found[part.rank].append((gradient, count))
    return total, found
