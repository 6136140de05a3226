"""The end of a job when its driver has no further round."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import parse_object
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.training import session
from tests.support.toy import toy


class _LostRank(Exception):
    pass


class _TwoRounds:
    """A driver that has two rounds, and gives up then."""

    elastic = True
    local_rank = 0
    local_size = 1

    def __init__(self) -> None:
        self.left = 2

    def enter(self, why: str, text: str, step: int) -> SoloComm:
        if not self.left:
            raise JobFailed("too many rounds")
        self.left -= 1
        return SoloComm()

    def is_over(self, error: BaseException) -> bool:
        return isinstance(error, _LostRank)


@pytest.mark.parametrize(("last_failed", "cards"), [(True, ["second"]), (False, [])])
def test_a_card_is_written_of_the_last_round_alone_and_only_if_it_failed(
    monkeypatch: pytest.MonkeyPatch, last_failed: bool, cards: list[str]
) -> None:
    written: list[str] = []
    names = iter(["first", "second"])

    def train(current: session.Round, *given: object) -> None:
        name = next(names)
        current.reporter = SimpleNamespace(report_no_new_round=lambda: written.append(name))
        if name == "first" or last_failed:
            raise _LostRank

    monkeypatch.setattr(session, "_train_round", train)
    run = parse_object({"task": "toy"}, None)
    with pytest.raises(JobFailed):
        session.run_training(run, toy, _TwoRounds(), None, RankInfo())  # type: ignore[arg-type]
    assert written == cards
