"""What a rank of a plan holds for the trained parameters, in bytes. Pure; needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.compression.sizes import ITEM_BYTES
from hvdtrain.plan.collectives import buckets, workers_of
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.plan.shards import divide


@dataclass(frozen=True)
class Held:
    """Memory of the rank that holds most of it.

    Attributes:
        what: parameters, gradients (of bfloat16 as fp32 where they are divided), state of the optimizer, or a copy.
        nbytes: None if it is unknown.
        since, until: the part of a step in which it is there.
    """

    what: str
    nbytes: float | None
    since: str = "always"
    until: str = "always"

    @property
    def title(self) -> str:
        """Its name for a reader."""
        return "optimizer state" if self.what == "state" else self.what


def held(plan: Plan, gradients: Sequence[Gradient], ranks: Ranks, passes: int = 1) -> list[Held]:
    """Return what a rank holds if a step has `passes` passes; the gradients are in the model's order.

    Activations, buckets under way and gathered blocks are not counted.
    """
    if plan.shard == "parameters":
        gradients = [gradient.part(plan.dp_shard or ranks.size) for gradient in gradients]
    parameters = summed = sum(gradient.nbytes for gradient in gradients)
    own = [Counter({gradient: math.prod(gradient.shape) for gradient in gradients})]  # elements that ranks update
    elements = sum(own[0].values())
    if plan.shard in ("optimizer", "gradients"):
        segments, own = _segments(plan, gradients, ranks)
        summed = segments if plan.sums_each_pass or passes == 1 else summed
    known = [state for each in own if (state := _state(each)) is not None]
    state = max(known) if len(known) == len(own) else None
    served = 1 if plan.outer is None else workers_of(plan.outer, ranks.size).most_served
    found = [
        Held("parameters", served * parameters),
        Held("gradients", summed, "backward", "the update"),
        Held("state", None if state is None else served * state),
    ]
    found += [Held("copies in bf16", 2 * elements)] if plan.copies_weights else []
    found += [Held("average of parameters", parameters)] if plan.averaged else []
    if plan.outer is not None:
        found += [Held("parameters that workers share", parameters)]
        found += [Held("outer momentum", 4 * elements)] if plan.outer.momentum else []
    return found


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
    made = buckets(plan, gradients, ranks, plan.first_compression)
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
