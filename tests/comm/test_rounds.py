"""A rank of an elastic job gives up a step as soon as it is told that another is gone."""

from __future__ import annotations

import pytest

from hvdtrain.comm.rounds import SeatedRounds
from hvdtrain.runtime.environment import rank_info


class _Seat:
    """Told of a lost rank when so many micro-batches have been asked for."""

    def __init__(self, after: int) -> None:
        self._after = after

    def is_broken(self) -> bool:
        self._after -= 1
        return self._after < 0


@pytest.mark.parametrize("after", [0, 1, 4])
def test_no_micro_batch_is_begun_once_a_rank_is_gone(after: int) -> None:
    rounds = SeatedRounds(_Seat(after), rank_info({}))  # type: ignore[arg-type]
    begun: list[int] = []
    with pytest.raises(Exception, match="gone") as caught:
        begun.extend(rounds.unless_over(range(8)))
    assert rounds.is_over(caught.value)
    assert begun == list(range(after))


def test_a_round_that_is_whole_gives_all_of_them() -> None:
    rounds = SeatedRounds(_Seat(8), rank_info({}))  # type: ignore[arg-type]
    assert list(rounds.unless_over(range(8))) == list(range(8))
