"""What the page of combinations says: it is that of the rules, and what goes together trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.plan.refusals import ELASTIC
from hvdtrain.training.result import Result
from tests.support.combinations import SETTINGS, covering, page, pairs, refused
from tests.support.gallery import DIVIDING
from tests.support.launch import ROOT
from tests.support.thread_job import train_on_threads

APART = {"parallel.engine", "parallel.tp", "parallel.ep", "parallel.cp", "parallel.pp"}
"""What needs processes: jobs of the gallery train it, of which tests/laws asserts more."""
NOT_HERE = {"train.micro_batch", "train.compile", ELASTIC}
"""What needs a GPU, blocks, or other ranks later."""
EIGHT_RANKS = {"parallel.dp_shard", "parallel.tp"}
"""What would need so many, for two groups in which matrices have copies."""
TOGETHER = covering([each for each in SETTINGS if not {*each} & (APART | NOT_HERE)])


def test_the_page_is_that_of_the_rules() -> None:
    assert (ROOT / "docs/combinations.md").read_text() == page(), "make reference"


JOBS = [dict(word[2:].split("=", 1) for word in words) for words in DIVIDING]


def _is_in(job: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    """Whether a job has options; a number stands for any."""
    return all(
        name in job and (type(value) in (int, float) or job[name].partition(":")[0] == str(value).lower())
        for name, value in options.items()
    )


def test_each_two_settings_that_go_together_are_in_a_run() -> None:
    lacking = []
    for one, other, both, found in pairs():
        if both is None or found or {*both} & NOT_HERE or {*both} >= EIGHT_RANKS:
            continue
        if {*both} & APART:
            lacking += [] if any(_is_in(job, both) for job in JOBS) else [both]
        elif {**one, **other} == {**other, **one}:
            lacking += [] if any(both.items() <= run.items() for run in TOGETHER) else [both]
    assert not lacking


def _train(size: int, *options: str) -> Result:
    length = (
        "--dropout=0",
        "--train.steps=8",
        "--train.global_batch=24",
        "--train.micro_batch=2",
        "--optimizer.lr=0.05",
    )
    unobserved = ("--checkpoint.every=0", "--observe.tensorboard=false", "--observe.timeline=off")
    return train_on_threads(f"--task={ROOT}/tests/support/toy.py:toy", *length, *unobserved, *options, size=size)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The held-out loss of one rank."""
    return _train(1, f"--run_dir={tmp_path_factory.mktemp('plain')}").last_heldout_loss


@pytest.mark.parametrize("options", TOGETHER, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.some(8)
def test_what_goes_together_trains(options: Mapping[str, Any], tmp_path: Path, plain: float) -> None:
    """As one rank does, but for workers and for compressions that lose much, which learn otherwise."""
    assert not refused(options)
    words = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    found = _train(2, *words, "--train.check_every=2", f"--run_dir={tmp_path}")
    assert found.last_heldout_loss < 0.8 * found.first_heldout_loss
    if options.get("parallel.compression") not in ("topk", "powersgd") and "parallel.sync" not in options:
        assert found.last_heldout_loss == pytest.approx(plain, rel=0.02)
