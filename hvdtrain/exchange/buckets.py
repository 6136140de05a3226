"""Assign gradients to flat buckets, in the order in which backward finishes them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from hvdtrain.compression.base import BucketShape, Part
from hvdtrain.compression.sizes import fill, padded

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class BucketPlan:
    """The gradients that are exchanged together.

    It is equal on all ranks, and saved with a run so that a resumed run groups its sums in the same way.

    Attributes:
        buckets: names of parameters of one dtype and device, in the order in which backward finishes them.
        sparse: names of parameters with sparse gradients; each is exchanged alone.
        rows: number of non-zero rows of dense gradients with few of them, by name; each is alone in a bucket.
        limit_bytes: size limit of a bucket with which the plan was made; 0 if unknown.
    """

    buckets: tuple[tuple[str, ...], ...]
    sparse: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int = 0

    def without_rows(self, names: Collection[str]) -> BucketPlan:
        """Return the plan that sends all rows of these gradients."""
        return replace(self, rows={name: count for name, count in self.rows.items() if name not in names})

    def fits(self, named: Named) -> bool:
        """Whether it has exactly these parameters, and each bucket has one dtype and device."""
        by_name = dict(named)
        names = [*(name for bucket in self.buckets for name in bucket), *self.sparse]
        return sorted(names) == sorted(by_name) and all(
            len({(by_name[name].dtype, by_name[name].device) for name in bucket}) == 1 for bucket in self.buckets
        )


def assign_buckets(
    named: Named,
    limit_bytes: int,
    finished: Sequence[str] = (),
    sparse: Iterable[str] = (),
    groups: Sequence[Sequence[str]] = (),
    rows: Mapping[str, int] | None = None,
) -> BucketPlan:
    """Assign parameters to buckets of at most `limit_bytes`. A larger parameter gets a bucket of its own.

    Args:
        named: parameters in the model's order.
        limit_bytes: size limit of a bucket.
        finished: names in the order in which a backward pass finished their gradients. Parameters that it skipped come
            last and in buckets of their own, because a bucket starts when it is full. If it is empty, the reverse of
            the model's order is used, which is similar.
        sparse: names of parameters with sparse gradients.
        groups: names that share a bucket for each dtype and device, whatever their size.
        rows: number of non-zero rows, by name, of gradients with few of them. Ignored for parameters in a group.
    """
    by_name = dict(named)
    alone = set(sparse)
    first = dict.fromkeys(name for name in finished if name in by_name)
    order = [*first, *(name for name, _ in reversed(named) if name not in first)]
    rest = set(order) - first.keys()
    buckets: list[list[str]] = []
    grouped = {name: number for number, group in enumerate(groups) for name in group}
    few = {name: count for name, count in (rows or {}).items() if name not in grouped}
    runs = [([n for n in order if grouped.get(n) == number], sys.maxsize) for number in range(len(groups))]
    runs += [([n for n in order if n not in grouped and (n in rest) == late], limit_bytes) for late in (False, True)]
    for names, limit in runs:
        buckets += fill(
            [name for name in names if name not in alone],
            limit,
            lambda name: by_name[name].numel() * by_name[name].dtype.itemsize,
            lambda name: (by_name[name].dtype, by_name[name].device),
            few,
        )
    return BucketPlan(tuple(map(tuple, buckets)), tuple(name for name, _ in named if name in alone), few, limit_bytes)


@dataclass(frozen=True)
class Layout:
    """The layout of one bucket.

    Attributes:
        parameters: of its gradients, in the order of `shape.parts`.
        shape: where each gradient is; one of complex numbers as pairs of real ones.
    """

    parameters: tuple[nn.Parameter, ...]
    shape: BucketShape


def lay_out(agreed: BucketPlan, by_name: Mapping[str, nn.Parameter], name: str) -> list[Layout]:
    """Return the layout of each bucket; dense ones are called ``name/0`` and so on, sparse ones ``name/parameter``."""
    dense = [_lay_out_one(names, by_name, f"{name}/{number}") for number, names in enumerate(agreed.buckets)]
    return [*dense, *(_lay_out_one((sparse,), by_name, f"{name}/{sparse}") for sparse in agreed.sparse)]


def _lay_out_one(names: Sequence[str], by_name: Mapping[str, nn.Parameter], name: str) -> Layout:
    parameters = tuple(by_name[n] for n in names)
    dtype, device = parameters[0].dtype.to_real(), parameters[0].device
    parts = []
    length = 0
    for parameter_name, parameter in zip(names, parameters, strict=True):
        like = as_real(torch.empty_like(parameter, device="meta"))
        # A gradient needs the strides of its parameter, because torch's fused optimizers ignore strides.
        stride = None if parameter.is_contiguous() else like.stride()
        parts.append(Part(parameter_name, like.shape, length, stride))
        length += padded(like.numel(), dtype.itemsize)
    return Layout(parameters, BucketShape(name, tuple(parts), length, dtype, device))


def as_real(tensor: Tensor) -> Tensor:
    """Return the pairs of real numbers of a complex tensor, in a last dimension; a real tensor itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_gradient(stored: Tensor, parameter: Tensor) -> Tensor:
    """Return what `as_real` has made real as a gradient of `parameter` again."""
    return torch.view_as_complex(stored) if parameter.is_complex() else stored
