"""Which way to divide the state is proposed, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdtrain.fit.memory import Memory
from hvdtrain.fit.ways import GIB, Line, propose

SMALL = Line(2, "none", "none", Memory(0, 0, GIB // 2))
LARGE = Line(2, "optimizer", "none", Memory(0, 0, 2 * GIB))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ((), "nothing else was tried"),
        ((LARGE,), "nothing else fits"),
        ((LARGE, replace(SMALL, mesh="ep2", memory=Memory(0, 0, 1, waited_for=1))), "of 2 ways that fit"),
        ((replace(LARGE, memory=None, refused="no part"),), "nothing else fits"),
    ],
)
def test_a_proposal_says_what_else_there_is(others: tuple[Line, ...], why: str) -> None:
    lines, reasons = propose([SMALL, *others], 1.0)
    assert [line.proposed for line in lines] == [True, *(False for _ in others)]
    assert "--parallel.shard none" in reasons[0] and why in reasons[1]
    assert propose([LARGE], 1.0) == ([LARGE], [])
