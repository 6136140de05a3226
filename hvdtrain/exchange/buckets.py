"""Which parameter's gradient lies where: flat buckets, planned from the order in which backward finishes. Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hvdtrain.compression.base import BucketShape, Part
from hvdtrain.compression.bucket_filling import fill, padded

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Plan:
    """What is exchanged together; the same on all ranks, and kept with a run so that its sums are always grouped alike.

    Attributes:
        buckets: names of parameters of one dtype and device, in the order in which backward finishes them.
        sparse: names of parameters whose gradients are sparse; each travels alone.
        rows: names of dense ones of which few rows were not zero, each alone in a bucket, and how many rows that were.
        limit_bytes: of a bucket, by which they were divided; 0 where it is not known.
    """

    buckets: tuple[tuple[str, ...], ...]
    sparse: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int = 0

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Plan:
        """The plan whose fields, as JSON, are these."""
        buckets, sparse = tuple(map(tuple, saved["buckets"])), tuple(saved["sparse"])
        return cls(buckets, sparse, dict(saved.get("rows", {})), int(saved.get("limit_bytes", 0)))

    def without_rows(self, names: Collection[str]) -> Plan:
        """With all rows of these."""
        return replace(self, rows={name: count for name, count in self.rows.items() if name not in names})

    def fits(self, named: Named) -> bool:
        """Whether it holds exactly these parameters, and each bucket those of one dtype and device."""
        of = dict(named)
        names = [*(name for bucket in self.buckets for name in bucket), *self.sparse]
        return sorted(names) == sorted(of) and all(
            len({(of[name].dtype, of[name].device) for name in bucket}) == 1 for bucket in self.buckets
        )


def plan(
    named: Named,
    limit_bytes: int,
    finished: Sequence[str] = (),
    sparse: Iterable[str] = (),
    groups: Sequence[Sequence[str]] = (),
    rows: Mapping[str, int] | None = None,
) -> Plan:
    """Divide parameters into buckets of at most `limit_bytes`, a larger one alone.

    Args:
        named: parameters, in the model's order.
        limit_bytes: of a bucket.
        finished: names in the order in which a backward pass finished their gradients. Those that it left out come
            last, apart from the others: a bucket is exchanged when all of it is there. Without it, the reverse of the
            model's order, which is about the same.
        sparse: names of those that have sparse gradients.
        groups: names that share a bucket for each dtype and device, whatever their size.
        rows: how many rows are not zero, by name of those of which these are few; what is of a group stays there.
    """
    of = dict(named)
    alone = set(sparse)
    first = dict.fromkeys(name for name in finished if name in of)
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
            lambda name: of[name].numel() * of[name].dtype.itemsize,
            lambda name: (of[name].dtype, of[name].device),
            few,
        )
    return Plan(tuple(map(tuple, buckets)), tuple(name for name, _ in named if name in alone), few, limit_bytes)


@dataclass(frozen=True)
class Layout:
    """One bucket.

    Attributes:
        parameters: those whose gradients it holds, as `shape.parts` lists them.
        shape: where each lies.
    """

    parameters: tuple[nn.Parameter, ...]
    shape: BucketShape


def lay_out(agreed: Plan, of: Mapping[str, nn.Parameter], name: str) -> list[Layout]:
    """Give each gradient its place; buckets are called ``name/0`` and so on, sparse ones after their parameters."""
    dense = [_lay_out_one(names, of, f"{name}/{number}") for number, names in enumerate(agreed.buckets)]
    return [*dense, *(_lay_out_one((sparse,), of, f"{name}/{sparse}") for sparse in agreed.sparse)]


def _lay_out_one(names: Sequence[str], of: Mapping[str, nn.Parameter], name: str) -> Layout:
    parameters = tuple(of[n] for n in names)
    dtype, device = parameters[0].dtype, parameters[0].device
    parts = []
    length = 0
    for parameter_name, parameter in zip(names, parameters, strict=True):
        # torch's fused optimizers ignore strides: a gradient must be stored as its parameter is.
        stride = None if parameter.is_contiguous() else torch.empty_like(parameter, device="meta").stride()
        parts.append(Part(parameter_name, parameter.shape, length, stride))
        length += padded(parameter.numel(), dtype.itemsize)
    return Layout(parameters, BucketShape(name, tuple(parts), length, dtype, device))
