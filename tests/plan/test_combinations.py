"""What the page of combinations says: it is that of the rules, and what goes together trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.plan.refusals import ELASTIC
from hvdtrain.training.result import Result
from tests.support.combinations import SETTINGS, covering, page, pairs, refused
from tests.support.launch import ROOT
from tests.support.thread_job import train_on_threads

APART = {"parallel.engine", "parallel.tp", "parallel.ep", "parallel.cp", "parallel.pp"}
"""What needs processes: tests/laws has them."""
NOT_HERE = {"train.micro_batch", "train.compile", ELASTIC}
"""What needs a GPU, blocks, or other ranks later."""
TOGETHER = covering([each for each in SETTINGS if not {*each} & (APART | NOT_HERE)])


def test_the_page_is_that_of_the_rules() -> None:
    assert (ROOT / "docs/combinations.md").read_text() == page(), "make reference"


def test_each_two_settings_that_go_together_are_in_a_run() -> None:
    for one, other, both, found in pairs():
        if both is not None and not found and not {*both} & (APART | NOT_HERE) and {**one, **other} == {**other, **one}:
            assert any({**one, **other}.items() <= run.items() for run in TOGETHER), (one, other)


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
def test_what_goes_together_trains(options: Mapping[str, Any], tmp_path: Path, plain: float) -> None:
    """As one rank does, but for workers and for compressions that lose much, which learn otherwise."""
    assert not refused(options)
    words = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    found = _train(2, *words, "--train.check_every=2", f"--run_dir={tmp_path}")
    assert found.last_heldout_loss < 0.8 * found.first_heldout_loss
    if options.get("parallel.compression") not in ("topk", "powersgd") and "parallel.sync" not in options:
        assert found.last_heldout_loss == pytest.approx(plain, rel=0.02)
