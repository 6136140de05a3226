"""How ranks and places are called."""

from __future__ import annotations

from msgspec.structs import replace

from hvdtrain.observe.failure.statement import CURRENT, Statement, agree, grouped, labels, place, ranges
from tests.observe.failure.test_verdict import busy, failed, waiting, who


def test_ranks_at_one_place_are_taken_together() -> None:
    statements = [busy(0), *(waiting(rank, "gradients/0", idle_s=3.0 + rank / 10) for rank in (1, 2, 3, 5))]
    (first, _), (others, longest) = grouped(statements)
    assert (first, others) == ("rank 0 on a", "ranks 1-3, 5 on a")
    assert place(longest) == "in wait at step 12 for 3.5 s, waiting for gradients/0"


def test_ranks_that_wait_for_different_collectives_are_distinguished() -> None:
    found = [who for who, _ in grouped([waiting(0, "gradients/0"), waiting(1, "gradients/1")])]
    assert found == ["rank 0 on a", "rank 1 on a"]


def test_names() -> None:
    assert ranges([0]) == "0"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert labels([who(2, "b"), who(1, "a")]) == "ranks 1-2"
    assert place(Statement(CURRENT, 0.0, who(0))) == "before the first step"
    assert place(replace(failed(0), last_span="forward")) == "at step 3, last in forward"
    assert (agree([1], "is", "are"), agree([1, 2], "is", "are")) == ("is", "are")
