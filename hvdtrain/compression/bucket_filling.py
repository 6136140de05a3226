"""The rule that assigns gradients to buckets, shared by the exchange and by predictions. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable

FEW_ROWS = 1 / 4
"""A gradient may be sent as rows if at most this share of its rows is not zero."""
_ALIGNMENT = 64
"""Bytes. A gradient's view starts at a cache line, where vector instructions are fast."""


def fill(
    names: Iterable[str],
    limit_bytes: int,
    size_of: Callable[[str], int],
    kind_of: Callable[[str], Hashable],
    alone: Collection[str] = (),
) -> list[list[str]]:
    """Assign gradients in order to buckets of at most `limit_bytes`. A larger gradient gets a bucket of its own.

    Args:
        names: in the order in which backward finishes them.
        limit_bytes: size limit of a bucket.
        size_of: bytes of a gradient.
        kind_of: only gradients of the same kind (dtype, device) share a bucket.
        alone: gradients that get a bucket of their own.
    """
    buckets: list[list[str]] = []
    open_: dict[Hashable, tuple[list[str], int]] = {}
    for name in names:
        if name in alone:
            buckets.append([name])
            continue
        kind, length = kind_of(name), size_of(name)
        bucket, used = open_.get(kind, ([], 0))
        if not bucket or used + length > limit_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(name)
        open_[kind] = (bucket, used + length)
    return buckets


def padded(count: int, item_bytes: int) -> int:
    """Return the elements that a gradient of `count` takes in a bucket, with the gap after it."""
    step = max(1, _ALIGNMENT // item_bytes)
    return -(-count // step) * step
