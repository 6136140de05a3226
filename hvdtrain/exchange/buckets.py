"""The flat buckets of a model's gradients, as tensors; their size, and the variant of their compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import BucketShape, Part
from hvdtrain.compression.sizes import packed
from hvdtrain.compression.table import Compression, parse
from hvdtrain.plan.buckets import BucketPlan, Sizes, assign
from hvdtrain.runtime.environment import by_gloo
from hvdtrain.runtime.rules import NICE
from hvdtrain.runtime.threads import lower_own_priority

Named = Sequence[tuple[str, nn.Parameter]]


def sizes_of(named: Named) -> Sizes:
    """Return the sizes of the gradients of parameters: those of one dtype and device are of one kind."""
    return {name: (p.numel() * p.dtype.itemsize, (p.dtype, p.device)) for name, p in named}


def assign_buckets(named: Named, limit_bytes: int, finished: Sequence[str] = (), **more: Any) -> BucketPlan:
    """Assign parameters, in the model's order, to buckets: see `plan.buckets.assign`."""
    return assign(sizes_of(named), limit_bytes, finished, **more)


@dataclass(frozen=True)
class Layout:
    """The layout of one bucket."""

    parameters: tuple[nn.Parameter, ...]  # of its gradients, in the order of `shape.parts`
    shape: BucketShape  # where each gradient is; one of complex numbers as pairs of real ones


def lay_out(agreed: BucketPlan, by_name: Mapping[str, nn.Parameter], name: str) -> list[Layout]:
    """Return the layout of each bucket; dense ones are called ``name/0`` and so on, sparse ones ``name/parameter``."""
    dense = [_lay_out_one(names, by_name, f"{name}/{number}") for number, names in enumerate(agreed.buckets)]
    return [*dense, *(_lay_out_one((sparse,), by_name, f"{name}/{sparse}") for sparse in agreed.sparse)]


def _lay_out_one(names: Sequence[str], by_name: Mapping[str, nn.Parameter], name: str) -> Layout:
    parameters = tuple(by_name[n] for n in names)
    dtype, device = parameters[0].dtype.to_real(), parameters[0].device
    like = [as_real(torch.empty_like(parameter, device="meta")) for parameter in parameters]
    starts, length = packed([each.numel() for each in like], dtype.itemsize)
    parts = tuple(
        # A gradient needs the strides of its parameter, because torch's fused optimizers ignore strides.
        Part(part, each.shape, start, None if parameter.is_contiguous() else each.stride())
        for part, parameter, each, start in zip(names, parameters, like, starts, strict=True)
    )
    return Layout(parameters, BucketShape(name, parts, length, dtype, device))


def as_real(tensor: Tensor) -> Tensor:
    """Return the pairs of real numbers of a complex tensor, in a last dimension; a real tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_gradient(stored: Tensor, parameter: Tensor) -> Tensor:
    """Return what `as_real` has made real as a gradient of `parameter` again."""
    return torch.view_as_complex(stored) if parameter.is_complex() else stored


def prepare_exchange(
    compression: Compression, comm: Comm, variables: Mapping[str, str], bucket_mib: float | None = None
) -> int:
    """Return the bytes of the largest bucket; lower this thread's priority if bulk data is sent between hosts.

    `variables` is the environment of this process. Without `bucket_mib`, the compression's default counts.
    """
    one_host = comm.local_size >= comm.size
    if compression.kind.bulk and not one_host:
        lower_own_priority(variables.get(NICE, ""))
    return int(bucket_mib * (1 << 20)) if bucket_mib else compression.bucket_bytes(one_host=one_host)


def resolve_compression(text: str, device: torch.device, variables: Mapping[str, str]) -> Compression:
    """Return the compression that an option names, in its best variant for `device` and the job of `variables`."""
    compression = parse(text)
    return compression.where_halves_are_slow() if device.type == "cpu" and by_gloo(variables) else compression
