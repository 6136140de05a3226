"""The buckets of each engine, and what it exchanges for them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.compression.sizes import plain, shard_bucket_bytes
from hvdtrain.compression.table import Compression
from hvdtrain.errors import ConfigError
from hvdtrain.timeline.whatif.bucket_plan import Gradient, PlannedBucket, lay_out, plan_buckets
from hvdtrain.timeline.whatif.evidence import Evidence, Job

_DDP_MIB = 25.0
AT_ONCE = 2
"""Buckets that an engine which divides the update exchanges at a time, as in `engine.sharded` and elsewhere."""


def job_buckets(evidence: Evidence, job: Job) -> list[PlannedBucket]:
    """Return the buckets that a job would have, of what several ranks sum."""
    if evidence.buckets:
        return list(evidence.buckets)
    compression = evidence.compression_of(job.compression)
    limit = bucket_limit(evidence, job)
    if job.dimensions.divides_model:
        summed = [replace(g, rows=None) for g in evidence.gradients if job.summing(g.summed_by).size > 1]
        return plan_buckets(summed, limit, compression, job.ranks.size)
    if job.engine == "horovod" and not job.is_divided:
        work = job.passes / evidence.job.passes
        return plan_buckets(evidence.gradients, limit, compression, job.ranks.size, work)
    dense = [replace(gradient, rows=None) for gradient in evidence.gradients]  # only that engine sends rows
    if job.engine == "ddp":
        return [lay_out(bucket) for bucket in fill_ddp(dense, limit)]
    if job.engine == "fsdp":
        return [lay_out(unit) for unit in fsdp_units(dense)]
    return plan_buckets(dense, limit, compression, job.ranks.size)


def bucket_limit(evidence: Evidence, job: Job) -> int:
    """Return the size limit of a bucket in bytes."""
    if job.bucket_mib:
        return int(job.bucket_mib * (1 << 20))
    if job.engine == "ddp":
        return int(_DDP_MIB * (1 << 20))
    usual = evidence.compression_of(job.compression).bucket_bytes(one_host=job.ranks.hosts == 1)
    if not job.is_divided:
        return usual
    gradients = [(gradient.shape, gradient.nbytes) for gradient in evidence.gradients]
    total = sum(nbytes for _, nbytes in gradients)
    return shard_bucket_bytes(usual, total, job.ranks.size, () if evidence.by_element else gradients)


def bucket_collectives(job: Job, bucket: PlannedBucket, compression: Compression) -> list[tuple[str, float]]:
    """Return kind and bytes of each collective that sums a bucket, in order."""
    if job.is_divided:
        return [("reducescatter", float(plain(bucket.shape, job.ranks.size, 0)["allreduce"]))]
    return bucket.collectives(compression, job.summing(bucket.summed_by).size)


def unit_of(name: str) -> str:
    """Return the block of a parameter, or the module if it is outside of blocks.

    A block is a member of a list of modules (`engine.blocks`), so its name ends with the first number.
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts[:-1]) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])


def is_block(unit: str) -> bool:
    """Return whether a unit is a block."""
    return unit.rpartition(".")[2].isdecimal()


def fsdp_units(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """Return the gradients that FSDP exchanges together: those of each block, and all outside of blocks.

    They are in the order in which backward finishes them.

    Errors:
        ConfigError: there is no block.
    """
    found: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        unit = unit_of(gradient.name)
        found.setdefault(unit if is_block(unit) else "", []).append(gradient)
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
    buckets: list[list[Gradient]] = []
    open_: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        bucket = open_.get(gradient.dtype)
        if bucket is None:
            buckets.append(bucket := open_.setdefault(gradient.dtype, []))
        bucket.append(gradient)
        if math.fsum(one.nbytes for one in bucket) >= limit_bytes:
            del open_[gradient.dtype]
    return buckets
