"""Rounds of a job: the memory of the last one, and the end when its driver has no further round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.comm.rounds import Rounds
from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.parse import parse_object
from hvdtrain.runtime.driver_client import JobFailed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.timeline import TimelinePlan
from hvdtrain.training import session
from tests.support.buffers import watch_buffers
from tests.support.toy import toy


class _LostRank(Exception):
    pass


class _Rounds(Rounds):
    """Of one rank each. The driver gives up after `most`; a rank is lost after the second step of the first."""

    elastic = True

    def __init__(self, most: int) -> None:
        super().__init__(SoloComm())
        self.left, self.steps = most, 0

    def enter(self, why: str, text: str = "", step: int = -1) -> SoloComm:
        if not self.left:
            raise JobFailed("too many rounds")
        self.left -= 1
        return SoloComm()

    def is_over(self, error: BaseException) -> bool:
        return isinstance(error, _LostRank)

    def requests(self, requests: list[int], changed: int, terminate: int) -> list[int]:
        self.steps += 1
        if self.steps == 3:  # the gradients of the second step are still there
            raise _LostRank
        return requests


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
        session.run_training(run, toy, _Rounds(2), None, RankInfo())  # type: ignore[arg-type]
    assert written == cards


@pytest.mark.parametrize("compression", ["bf16", "topk:0.5"])
def test_a_round_frees_the_buckets_of_the_last_one_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compression: str
) -> None:
    alive = watch_buffers(monkeypatch)
    options = {"run_dir": str(tmp_path / "run"), "parallel": {"compression": compression}, "train": {"steps": 4}}
    run = parse_object({"task": "toy", **options}, None)
    result = session.run_training(run, toy, _Rounds(2), TimelinePlan("off"), RankInfo(folder=tmp_path))
    assert result.step == 4 and len(alive) >= 2
    # The new bucket takes the residual over from the copy of it, which is then freed.
    assert not any(alive)
