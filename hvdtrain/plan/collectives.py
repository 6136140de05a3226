"""What the ranks of a plan exchange in a step: buckets of gradients, and collectives with their bytes. Pure.

Engines send what is here; the exchange of activations (`Dimensions`) is left out. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hvdtrain.compression.sizes import ITEM_BYTES, Bucket, packed, plain, shard_bucket_bytes
from hvdtrain.compression.table import Compression, parse, parse_outer
from hvdtrain.config.sync import OuterPlan
from hvdtrain.data.tree import nodes_of
from hvdtrain.errors import ConfigError
from hvdtrain.plan.buckets import Sizes, are_few, assign
from hvdtrain.plan.gradients import Gradient, finished
from hvdtrain.plan.plan import Plan, Ranks

if TYPE_CHECKING:
    from hvdtrain.data.order import Workers

DDP_MIB = 25.0
"""torch's default."""
AT_ONCE = 2
"""Buckets that an engine which divides the update sums at the same time: their memory is not divided."""


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket."""

    gradients: Sequence[Gradient]  # in the order in which backward finishes them
    shape: Bucket  # what the size of its payloads depends on
    starts: Sequence[int]  # first element of each gradient
    rows: int = 0  # rows sent instead of the whole gradient, over all ranks; 0 to send all of it

    @property
    def names(self) -> list[str]:
        """The names of its gradients."""
        return [gradient.name for gradient in self.gradients]

    @property
    def summed_by(self) -> float:
        """Share of all ranks that sum it."""
        return self.gradients[0].summed_by

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.length * ITEM_BYTES[self.shape.dtype]

    def collectives(self, compression: Compression, ranks: int) -> list[tuple[str, float]]:
        """Return kind and bytes of each collective that sums it on all of `ranks`, in order."""
        if self.rows:
            item = ITEM_BYTES[self.shape.dtype] if compression.exact else 2
            width = math.prod(self.shape.shapes[0][1:])
            return [("allgather", 4.0 * self.rows / ranks), ("allreduce", float(item * self.rows * width))]
        return compression.collectives(self.shape, ranks)


@dataclass(frozen=True)
class Collective:
    """A collective of a step."""

    name: str  # of what is exchanged
    parameters: Sequence[str]  # their names; empty for all of the model
    nbytes: float  # that each rank hands over
    ranks: int  # number of those that take part
    when: str  # in a step
    kind: str  # allreduce, reducescatter, allgather or alltoall
    times: float = 1  # in a step, on average


def lay_out(gradients: Sequence[Gradient]) -> PlannedBucket:
    """Return a bucket of these gradients, of one dtype, that the same ranks sum."""
    starts, length = packed((math.prod(gradient.shape) for gradient in gradients), ITEM_BYTES[gradients[0].dtype])
    shape = Bucket([gradient.shape for gradient in gradients], gradients[0].dtype, length)
    return PlannedBucket(gradients, shape, starts)


def collectives(plan: Plan, gradients: Sequence[Gradient], ranks: Ranks, passes: int = 1) -> list[Collective]:
    """Return the collectives of a step of `passes` passes: those of gradients and of parameters.

    The gradients are in the model's order.

    Errors: ConfigError: of FSDP, no name shows a block.
    """
    if plan.outer is not None:
        workers = workers_of(plan.outer, ranks.size)
        changes = between_workers(plan.outer, sum(math.prod(gradient.shape) for gradient in gradients), workers)
        own = collectives(replace(plan, outer=None), gradients, _part(ranks, len(workers.ranks_of(0))), passes)
        return [*own, *([changes] if changes.ranks > 1 else [])]
    if ranks.size == 1:
        return []
    if plan.dp_shard is not None and plan.dp_shard < ranks.size:
        width = plan.dp_shard
        inside = replace(plan, dp_shard=None, compression="none")
        among = replace(plan, dp_shard=None, engine="horovod", shard="none")
        copies = Ranks(ranks.size // width, max(1, ranks.per_host // width))
        sums_of_rows = collectives(among, [gradient.part(width) for gradient in gradients], copies)
        return [*collectives(inside, gradients, _part(ranks, width), passes), *sums_of_rows]
    made = buckets(plan, gradients, ranks, plan.first_compression)
    return exchanged(plan, made, ranks, passes, plan.first_compression)


def _part(ranks: Ranks, size: int) -> Ranks:
    return Ranks(size, min(size, ranks.per_host))


def exchanged(
    plan: Plan, made: Sequence[PlannedBucket], ranks: Ranks, passes: int, compression: Compression
) -> list[Collective]:
    """Return the collectives of these buckets in a step."""
    summed, gathered = list[Collective](), list[Collective]()
    times, when = (passes, "each backward pass") if plan.sums_each_pass else (1, "the last backward pass")
    by_fsdp = plan.engine == "fsdp"
    for number, bucket in enumerate(made):
        size = plan.summing(ranks, bucket.summed_by).size
        for kind, nbytes in sums(plan, bucket, ranks, compression):
            summed.append(Collective(f"gradients/{number}", bucket.names, nbytes, size, when, kind, times))
        if plan.shard != "none":
            nbytes, is_block = _coded(bucket, size, compression)["allgather"], bool(bucket.gradients[0].block)
            before = "each pass of a block" if is_block and by_fsdp else "each forward pass" if by_fsdp else "forward"
            often = passes * (1 + is_block) if by_fsdp else 1
            gathered.append(Collective(f"parameters/{number}", bucket.names, nbytes, size, before, "allgather", often))
    return [*summed, *gathered]


def sums(plan: Plan, bucket: PlannedBucket, ranks: Ranks, compression: Compression) -> list[tuple[str, float]]:
    """Return kind and bytes of each collective that sums a bucket once, in order."""
    size = plan.summing(ranks, bucket.summed_by).size
    if plan.bits:
        item = 4 / min(4, ITEM_BYTES[bucket.shape.dtype])  # 16 bits are sent as fp32
        own = [("allgather", item * bucket.nbytes / size)] if plan.shard == "none" else []
        return [("alltoall", item * bucket.nbytes * most_nodes(plan, size)), *own]
    if plan.shard == "none":
        return bucket.collectives(compression, size)
    if compression.exact:
        return [("reducescatter", float(plain(bucket.shape, size, 0)["allreduce"]))]
    return [("alltoall", _coded(bucket, size, compression)["alltoall"])]


def most_nodes(plan: Plan, ranks: int) -> int:
    """Return how many sums of its micro-batches a rank sends, at most, where all are added in one order."""
    from hvdtrain.data.order import rank_share  # which imports numpy

    count = plan.micro_batches
    if plan.sums_each_pass or not count:
        return 1
    return max(len(nodes_of(rank_share(count, rank, ranks), count)) for rank in range(ranks))


def share_in_order(plan: Plan, ranks: int) -> float:
    """Return the bytes that a rank sends if all is added in one order, over those of an fp32 exchange."""
    return (1 + most_nodes(plan, ranks)) / 2 if plan.bits and ranks > 1 else 1.0


def _coded(bucket: PlannedBucket, ranks: int, compression: Compression) -> dict[str, float]:
    """Return the bytes of a bucket's gradients to their owners, and of an owner's parameters to all."""
    if compression.exact:
        return {"allgather": bucket.nbytes / ranks}
    by_owners = parse("bf16") if compression.kind.name == "fp16" else compression
    return {kind: float(nbytes) for kind, nbytes in by_owners.payload(bucket.shape, ranks).items()}


def buckets(plan: Plan, gradients: Sequence[Gradient], ranks: Ranks, compression: Compression) -> list[PlannedBucket]:
    """Return the buckets of what several ranks sum. The gradients are in the model's order."""
    divided, limit = plan.dimensions.divides_model, bucket_limit(plan, gradients, ranks, compression)
    by_name = {g.name: g for g in gradients if not divided or plan.summing(ranks, g.summed_by).size > 1}
    order = finished([*by_name.values()])
    if plan.engine == "ddp":
        return [lay_out(bucket) for bucket in fill_ddp(order, limit)]
    if plan.engine == "fsdp":
        return [lay_out(unit) for unit in fsdp_units(order)]
    is_whole = plan.shard == "none"  # else buckets have the reverse of the model's order, and no rows
    counts = {g.name: g.rows * ranks.size for g in order if g.rows and is_whole and not (divided or plan.bits)}
    rows = {name: count for name, count in counts.items() if are_few(count, by_name[name].shape[0])}
    sizes: Sizes = {g.name: (g.nbytes, (g.dtype, g.summed_by)) for g in by_name.values()}
    made = assign(sizes, limit, [g.name for g in order if is_whole and g.ready_s is not None], rows=rows)

    def lay_out_rows(names: Sequence[str]) -> PlannedBucket:
        bucket, count = lay_out([by_name[name] for name in names]), rows.get(names[0], 0)
        are_sent = bool(count) and compression.leaves_to_rows(bucket.shape, count, ranks.size)
        return replace(bucket, rows=count) if are_sent else bucket

    return [lay_out_rows(names) for names in made.buckets]


def bucket_limit(plan: Plan, gradients: Sequence[Gradient], ranks: Ranks, compression: Compression) -> int:
    """Return the size limit of a bucket in bytes."""
    if plan.bucket_mib or plan.engine == "ddp":
        return int((plan.bucket_mib or DDP_MIB) * (1 << 20))
    usual = compression.bucket_bytes(one_host=ranks.hosts == 1)
    if plan.shard == "none" or plan.dimensions.divides_model:
        return usual
    whole = [(gradient.shape, gradient.nbytes) for gradient in gradients if gradient.whole]
    return shard_bucket_bytes(usual, sum(gradient.nbytes for gradient in gradients), ranks.size, whole)


def workers_of(outer: OuterPlan, ranks: int) -> Workers:
    """Return the workers of a plan."""
    from hvdtrain.data.order import Workers  # which imports numpy

    return Workers(outer.workers, ranks, outer.shares)


def between_workers(outer: OuterPlan, length: int, workers: Workers) -> Collective:
    """Return the exchange of a fragment of the changes of `length` parameters, among the first ranks of workers."""
    kind, length = parse_outer(outer.coding), length // outer.fragments
    coded = ("allgather", workers.most_served * kind.payload_bytes(length))
    name, nbytes = ("allreduce", 4 * length) if kind.name == "none" else coded
    every, leaders = outer.interval, len(workers.leaders())
    return Collective("changes", (), nbytes, leaders, f"every {every} steps", name, 1 / every)


def fsdp_units(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """Return the gradients that FSDP exchanges together: those of each block, and all outside of blocks.

    They are in the order in which backward finishes them.

    Errors: ConfigError: there is no block.
    """
    found: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        found.setdefault(gradient.block, []).append(gradient)
    if not found.keys() - {""}:
        raise ConfigError(
            "--engine fsdp cannot be predicted: no name of a parameter shows a block of the model",
            expected="a number in the name, as in model.layers.3.weight",
            found=gradients[0].name if gradients else "no parameters",
            next_step="--shard gradients divides the optimizer of any model",
        )
    return list(found.values())


def fill_ddp(gradients: Sequence[Gradient], limit_bytes: int) -> list[list[Gradient]]:
    """Assign gradients to buckets as DDP does: a bucket is closed when it has reached the limit."""
    found: list[list[Gradient]] = []
    open_: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        bucket = open_.get(gradient.dtype)
        if bucket is None:
            found.append(bucket := open_.setdefault(gradient.dtype, []))
        bucket.append(gradient)
        if math.fsum(one.nbytes for one in bucket) >= limit_bytes:
            del open_[gradient.dtype]
    return found
