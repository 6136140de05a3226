"""What a rank of a plan holds for the trained parameters, in bytes. Pure; needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.compression.sizes import ITEM_BYTES
from hvdtrain.compression.table import parse
from hvdtrain.plan.collectives import buckets
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import AUTO, Plan, Ranks
from hvdtrain.plan.shards import divide


@dataclass(frozen=True)
class Held:
    """Memory of the rank that holds most of it.

    Attributes:
        what: parameters, gradients (of bfloat16 as fp32 where they are divided), or state, of the optimizer.
        nbytes: None if it is unknown.
        since, until: the part of a step in which it is there.
    """

    what: str
    nbytes: float | None
    since: str
    until: str


def held(plan: Plan, gradients: Sequence[Gradient], ranks: Ranks, passes: int = 1) -> list[Held]:
    """Return what a rank holds if a step has `passes` passes; the gradients are in the model's order.

    Activations, buckets under way and gathered blocks are not counted.

    Errors:
        ConfigError: of FSDP, no name shows a block.
    """
    parameters = summed = sum(gradient.nbytes for gradient in gradients)
    own = [Counter({gradient: math.prod(gradient.shape) for gradient in gradients})]  # elements that each rank updates
    if plan.shard == "parameters":
        among = plan.dp_shard or ranks.size
        own = [Counter({g: math.prod(g.shape[1:]) * -(-g.shape[0] // among) for g in gradients})]  # of rank 0
        parameters = summed = sum(count * ITEM_BYTES[gradient.dtype] for gradient, count in own[0].items())
    elif plan.shard != "none":
        segments, own = _segments(plan, gradients, ranks)
        summed = segments if plan.sums_each_pass or passes == 1 else summed
    states = [_state(each) for each in own]
    known = [state for state in states if state is not None]
    return [
        Held("parameters", parameters, "always", "always"),
        Held("gradients", summed, "backward", "the update"),
        Held("state", max(known) if len(known) == len(states) else None, "always", "always"),
    ]


def _state(own: Mapping[Gradient, int]) -> float | None:
    """Return the bytes of the optimizer's state for this number of elements of each parameter."""
    total = 0.0
    for gradient, count in own.items():
        if gradient.state_bytes is None:
            return None
        each, besides = gradient.state_bytes
        total += each * count + (besides if count else 0.0)
    return total


def _segments(plan: Plan, gradients: Sequence[Gradient], ranks: Ranks) -> tuple[int, list[Counter[Gradient]]]:
    """Return the bytes of a rank's segments of all buckets, and the elements of each parameter by rank."""
    made = buckets(plan, gradients, ranks, parse("none" if plan.compression == AUTO else plan.compression))
    without_copies = {*gradients} - {gradient for bucket in made for gradient in bucket.gradients}
    total = sum(gradient.nbytes for gradient in without_copies)
    found = [Counter({gradient: math.prod(gradient.shape) for gradient in without_copies}) for _ in range(ranks.size)]
    for number, bucket in enumerate(made):
        item, shapes = ITEM_BYTES[bucket.shape.dtype], bucket.shape.shapes
        copies = plan.summing(ranks, bucket.summed_by).size
        rows, segment = divide(shapes, copies, item, [gradient.whole for gradient in bucket.gradients], number)
        total += segment * (4 if bucket.shape.dtype == "bfloat16" else item)
        for part in rows:
            count = (part.end - part.begin) * math.prod(shapes[part.index][1:])
            found[part.rank][bucket.gradients[part.index]] += count
    return total, found
