"""Assign gradients to flat buckets, in the order in which backward finishes them. Pure; needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Sizes = dict[str, tuple[int, Hashable]]
"""Bytes and kind of each gradient by name, in the model's order. Only gradients of one kind share a bucket."""
_MANY = 256
"""Buckets. Horovod's response cache holds 1,024 tensors; a compression sends some for each bucket."""


def are_few(count: int, length: int) -> bool:
    """Whether a gradient of `length` rows may be sent as the `count` ones that are not zero on some rank.

    One of zeros, for example behind weights that start at zero, says nothing about later steps.
    """
    return 0 < count <= length / 4


@dataclass(frozen=True)
class BucketPlan:
    """The gradients that are exchanged together.

    It is equal on all ranks, and saved with a run so that a resumed run groups its sums in the same way.

    Attributes:
        buckets: names of parameters of one kind, in the order in which backward finishes them.
        rows: number of non-zero rows of dense gradients with few of them, by name; each is alone in a bucket.
    """

    buckets: tuple[tuple[str, ...], ...]
    sparse: tuple[str, ...] = ()  # names of parameters with sparse gradients; each is exchanged alone
    rows: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: int = 0  # size limit of a bucket with which the plan was made; 0 if unknown

    def without_rows(self, names: Collection[str]) -> BucketPlan:
        """Return the plan that sends all rows of these gradients."""
        return replace(self, rows={name: count for name, count in self.rows.items() if name not in names})

    def fits(self, sizes: Sizes) -> bool:
        """Whether it has exactly these gradients, and each bucket has one kind."""
        names = [*(name for bucket in self.buckets for name in bucket), *self.sparse]
        return sorted(names) == sorted(sizes) and all(
            len({sizes[name][1] for name in bucket}) == 1 for bucket in self.buckets
        )


def assign(
    sizes: Sizes,
    limit_bytes: int,
    finished: Iterable[str] = (),
    sparse: Iterable[str] = (),
    groups: Sequence[Sequence[str]] = (),
    rows: Mapping[str, int] | None = None,
) -> BucketPlan:
    """Assign gradients to buckets of at most `limit_bytes`. A larger gradient gets a bucket of its own.

    Args:
        sizes: of the gradients.
        limit_bytes: size limit of a bucket. In a large model it is a 256th of all gradients.
        finished: names in the order in which a backward pass finished their gradients. Those that it skipped come last
            and in buckets of their own, because a bucket starts when it is full. If it is empty, the reverse of the
            model's order is used, which is similar.
        sparse: names of parameters with sparse gradients.
        groups: names that share a bucket for each kind, whatever their size.
        rows: number of non-zero rows, by name, of gradients with few of them. Ignored for parameters in a group.
    """
    alone = set(sparse)
    first = dict.fromkeys(name for name in finished if name in sizes)
    rest = [name for name in reversed(sizes) if name not in first]
    grouped = {name: number for number, group in enumerate(groups) for name in group}
    few = {name: count for name, count in (rows or {}).items() if name not in grouped}
    runs = [([n for n in (*first, *rest) if grouped.get(n) == number], sys.maxsize) for number in range(len(groups))]
    most = max(limit_bytes, sum(nbytes for nbytes, _ in sizes.values()) // _MANY)
    runs += [([n for n in names if n not in grouped], most) for names in (first, rest)]
    buckets: list[list[str]] = []
    for names, limit in runs:
        open_: dict[Hashable, tuple[list[str], int]] = {}
        for name in names:
            if name in alone:
                continue
            nbytes, kind = sizes[name]
            bucket, used = open_.get(kind, ([], 0))
            if not bucket or name in few or used + nbytes > limit:
                bucket, used = [], 0
                buckets.append(bucket)
            bucket.append(name)
            if name not in few:
                open_[kind] = (bucket, used + nbytes)
    return BucketPlan(tuple(map(tuple, buckets)), tuple(name for name in sizes if name in alone), few, limit_bytes)
