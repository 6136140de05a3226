"""A plan in words: which ranks hold what, with its memory, and what they send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.comm.dimensions import IN_GROUP
from hvdtrain.compression.sizes import ITEM_BYTES
from hvdtrain.plan.collectives import buckets, share_in_order, workers_of
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import BF16_WEIGHTS, Plan, Ranks
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
        whole = [gradient.whole for gradient in bucket.gradients]
        rows, segment = divide(shapes, copies, item, whole, number, by_rows=plan.bits)
        total += segment * (4 if bucket.shape.dtype == "bfloat16" else item)
        for part in rows:
            count = (part.end - part.begin) * (1 if part.flat else math.prod(shapes[part.index][1:]))
            found[part.rank][bucket.gradients[part.index]] += count
    return total, found


def describe(plan: Plan, ranks: int) -> list[tuple[str, str]]:
    """Return names and values: what `ranks` ranks do.

    Errors: ConfigError: that many ranks do not have the plan's dimensions or groups.
    """
    dimensions = plan.dimensions
    dimensions.check(ranks)
    plan.groups(ranks)
    if dimensions and plan.dp_shard is not None:
        dimensions.check(plan.dp_shard, IN_GROUP)
    found = [("ranks", str(ranks))]
    if dimensions:
        found += [("mesh", line.strip()) for line in dimensions.table(ranks)]
    found += [("parameters", _parameters(plan, ranks)), ("optimizer", _optimizer(plan))]
    found.append(("gradients", _gradients(plan, ranks)))
    sent = [text for name, text in _ACTIVATIONS.items() if getattr(dimensions, name) > 1]
    found += [("in passes", "; ".join(sent))] if sent else []
    if plan.outer is not None:
        outer = plan.outer
        changes = f"their changes in {outer.coding} every {outer.every} steps, in {outer.fragments} part(s)"
        found.append(("workers", f"{outer.workers}, which train apart and exchange {changes}"))
    found.append(("number of ranks", _changes(plan)))
    return found


_ACTIVATIONS = {
    "tp": "sums of what ranks compute with parts of a matrix",
    "ep": "tokens to the ranks that have their experts, and back",
    "cp": "heads of attention for parts of the sequence, and back",
    "pp": "activations to the next stage, gradients to the one before",
}


def _parameters(plan: Plan, ranks: int) -> str:
    held = "its part of the mesh" if plan.dimensions.divides_model else "all"
    if plan.shard != "parameters":
        copies = ", and a copy in bf16 for forward and backward" if plan.copies_weights else ""
        return f"each rank holds {held}{copies}"
    group = ranks if plan.dp_shard is None else plan.dp_shard
    groups = f"; {ranks // group} groups of {group} hold copies" if group < ranks else ""
    form = "in bf16 " if plan.precision == BF16_WEIGHTS else ""
    has_part = plan.dimensions.divides_model
    of = "of its part of the mesh, which ranks with copies" if has_part else "of each block, which all"
    return f"each rank holds rows {of} gather {form}for its passes (FSDP){groups}"


def _optimizer(plan: Plan) -> str:
    where = ", in the memory of the host" if plan.offload else ""
    if plan.shard == "none":
        return "each rank updates what it holds"
    if plan.shard == "parameters":
        return f"each rank updates its rows{where}"
    return f"of copies, each rank updates some rows and sends them to the others (ZeRO){where}"


def _gradients(plan: Plan, ranks: int) -> str:
    if plan.outer is not None:
        return "summed among the ranks of a worker"
    if ranks == 1:
        return "of one rank"
    among = "on the ranks with copies" if plan.dimensions.divides_model else "on all ranks"
    where = "at the owners of rows" if plan.shard != "none" else among
    when = "after each pass" if plan.sums_each_pass and plan.dp_shard is None else "once a step"
    how = "" if plan.compression == "none" else f", in {plan.compression}"
    if plan.bits:
        how = ", in one order: the same bits on any number of ranks" + more_bytes(plan, ranks)
    by = {"horovod": "", "ddp": ", by DDP", "fsdp": ", by FSDP"}[plan.engine]
    return f"summed {where} {when}, while backward runs{how}{by}"


def more_bytes(plan: Plan, ranks: int) -> str:
    """Return what sums in one order send more than fp32 sums, as an end of a sentence; "" if they do not."""
    share = share_in_order(plan, ranks)
    if share <= 1:
        return ""
    return (
        f"; a rank sends up to {share:.2g} times the bytes of an fp32 exchange, and the same if the number of ranks is"
        " a power of two that divides the micro-batches of a step, or with --parallel.shard gradients"
    )


def _changes(plan: Plan) -> str:
    if plan.elastic:
        return "may change while the job runs"
    may = plan.by_horovod and not plan.dimensions
    return "constant; with --elastic it may change while the job runs" if may else "constant; a resume may have another"
