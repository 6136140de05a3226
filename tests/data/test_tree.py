"""The tree of sums: the same for any number of ranks, and shares of any form."""

from __future__ import annotations

import pytest

from hvdtrain.data.order import rank_share
from hvdtrain.data.tree import Counter, Positions


def _expected(begin: int, level: int, count: int) -> str:
    """Return the sum of a node as a text with parentheses; "" if it has no position."""
    if level == 0 or begin >= count:
        return str(begin) if begin < count else ""
    left, right = (_expected(at, level - 1, count) for at in (begin, begin + (1 << (level - 1))))
    return f"({left}+{right})" if right else left


def _counter(count: int) -> Counter[str]:
    return Counter(count, lambda left, right: f"({left}+{right})")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 31])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 40])
def test_each_number_of_ranks_makes_the_same_sum(count: int, ranks: int) -> None:
    positions = Positions(count, tuple(rank_share(count, rank, ranks) for rank in range(ranks)))
    whole, most = _counter(count), 0
    for rank, share in enumerate(positions.shares):
        own = _counter(count)
        for position in share:
            own.add((position, 0), str(position))
        assert tuple(node for node, _ in own.parts) == positions.nodes(rank)
        most = max(most, len(own.parts))
        for node, value in own.parts:
            whole.add(node, value)
    ((_, value),) = whole.parts
    assert value == _expected(0, count.bit_length(), count)
    power = ranks & (ranks - 1) == 0 and count % ranks == 0
    assert most == 1 if power or ranks >= count else most <= 2 * count.bit_length()


@pytest.mark.parametrize("in_turn", [False, True])
def test_equal_shares_have_each_position_once(in_turn: bool) -> None:
    positions = Positions.equal(3, 4, in_turn=in_turn)
    assert sorted(position for share in positions.shares for position in share) == list(range(12))
    assert positions.of_pass(1) == ([4, 5, 6, 7] if in_turn else [1, 4, 7, 10])
    assert positions.of_pass(3) == [None] * 4
