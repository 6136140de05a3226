"""The one order in which the micro-batches of a step are summed: a binary tree over their positions. Pure.

A node of level k covers the 2^k positions from a multiple of 2^k on, without those beyond the last one. So the tree
depends on the number of micro-batches alone, and so do the bits of the sum, whichever rank adds which nodes. Demmel and
Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers 2015, have sums for any tree, at more cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")

Node = tuple[int, int]  # first position, and level


@dataclass(frozen=True)
class Positions:
    """The positions of the micro-batches of a step: `count` of all ranks, and those of each rank, in order."""

    count: int
    shares: tuple[range, ...]

    @classmethod
    def equal(cls, each: int, ranks: int, *, in_turn: bool = False) -> Positions:
        """Return those of ranks with `each` micro-batches, which are neighbours, or `in_turn` those of a pass are."""
        if in_turn:
            return cls(each * ranks, tuple(range(rank, each * ranks, ranks) for rank in range(ranks)))
        return cls(each * ranks, tuple(range(rank * each, (rank + 1) * each) for rank in range(ranks)))

    def of_pass(self, number: int) -> list[int | None]:
        """Return the position of each rank in a pass; None if it has none."""
        return [share[number] if number < len(share) else None for share in self.shares]

    def nodes(self, rank: int) -> tuple[Node, ...]:
        """Return the nodes that a rank has after its passes, as few as there can be."""
        return nodes_of(self.shares[rank], self.count)


class Counter(Generic[T]):
    """Adds up nodes in the order of their positions, like a binary counter: two that are siblings become their parent.

    Args:
        count: positions of the tree.
        add: returns the sum of the values of a left and a right sibling; it may change both.

    Attributes:
        parts: the nodes that are left with their values, in order; one if all positions were added.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self.parts: list[tuple[Node, T]] = []

    def add(self, node: Node, value: T) -> None:
        """Add the value of a node behind all that were added before."""
        begin, level = node
        while level < self._count.bit_length():  # the root has this level, or a lower one
            width = 1 << level
            if begin & width:
                left = begin - width, level
                if not self.parts or self.parts[-1][0] != left:
                    break
                begin, value = begin - width, self._add(self.parts.pop()[1], value)
            elif begin + width < self._count:
                break
            level += 1  # without a right sibling, the sum is that of the parent
        self.parts.append(((begin, level), value))


@lru_cache(maxsize=256)
def nodes_of(share: range, count: int) -> tuple[Node, ...]:
    """Return the nodes that positions of a tree of `count` make."""
    counter = Counter[None](count, lambda left, right: None)
    for position in share:
        counter.add((position, 0), None)
    return tuple(node for node, _ in counter.parts)
