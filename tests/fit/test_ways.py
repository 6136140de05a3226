"""Which of the ways that fit is proposed, and why."""

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
    assert reasons[0] == "proposal for 2 rank(s): --parallel.shard none" and why in reasons[1]
    assert propose([LARGE], 1.0) == ([LARGE], [])
    assert not any("waits for" in line for line in reasons)
    waiting = replace(SMALL, memory=Memory(0, 0, 1, waited_for=1 << 20))
    assert propose([waiting], 1.0)[1][-1] == "  and waits for 1.0 MiB of them in forward and backward"


def test_a_proposal_by_time_says_how_many_times_there_are() -> None:
    timed = [replace(SMALL, mesh=mesh, step_s=step_s) for mesh, step_s in (("tp2", 2.0), ("ep2", 1.0))]
    lines, reasons = propose([SMALL, *timed], 1.0)
    assert [line.proposed for line in lines] == [False, False, True]
    assert "of 3 ways that fit, it has the shortest step of 2 with a predicted time" in reasons[1]
    assert "it has the shortest step: a rank" in propose(timed, 1.0)[1][1]
