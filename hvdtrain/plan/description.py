"""A plan in words: which ranks hold what, and what they send."""

from __future__ import annotations

from hvdtrain.comm.dimensions import IN_GROUP
from hvdtrain.plan.collectives import share_in_order
from hvdtrain.plan.plan import BF16_WEIGHTS, Plan


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
