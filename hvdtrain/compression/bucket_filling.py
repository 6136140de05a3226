"""Which gradients share a bucket, and how long that is: the rule, without torch; the exchange itself goes by it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable

_ALIGNMENT = 64
"""Bytes: a view starts where vector instructions and cache lines do."""


def fill(
    names: Iterable[str],
    limit_bytes: int,
    size_of: Callable[[str], int],
    kind_of: Callable[[str], Hashable],
    alone: Collection[str] = (),
) -> list[list[str]]:
    """Divide gradients, as they come, into buckets of at most `limit_bytes`, a larger one alone.

    Args:
        names: in the order in which they come.
        limit_bytes: of a bucket.
        size_of: bytes of a gradient.
        kind_of: only those of one kind (dtype, device) share a bucket.
        alone: those that share one with no other.
    """
    buckets: list[list[str]] = []
    open_: dict[Hashable, tuple[list[str], int]] = {}
    for name in names:
        if name in alone:
            buckets.append([name])
            continue
        kind, length = kind_of(name), size_of(name)
        bucket, held = open_.get(kind, ([], 0))
        if not bucket or held + length > limit_bytes:
            bucket, held = [], 0
            buckets.append(bucket)
        bucket.append(name)
        open_[kind] = (bucket, held + length)
    return buckets


def padded(count: int, item_bytes: int) -> int:
    """Elements that a gradient of `count` takes in a bucket, with the gap behind it."""
    step = max(1, _ALIGNMENT // item_bytes)
    return -(-count // step) * step
