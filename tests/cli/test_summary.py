from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.train import summary
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.training.result import Result


def _result(**changed: Any) -> Result:
    facts: dict[str, Any] = {
        "run_dir": Path("runs/x"), "reason": "finished", "step": 5, "total_steps": 9, "resumed_at": 0, "budget": {},
        "first_loss": 2.0, "last_loss": 1.0, "first_heldout_loss": 2.0, "last_heldout_loss": 1.0, "metrics": {},
        "tokens_per_s": 124.0, "unit": "samples", "seconds": 3.0, "sizes": [2], "still_s": 0.0, "model": None,
        "train_on": "--train.steps 18",
    }  # fmt: skip
    return Result(**{**facts, **changed})


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([2], "124 samples/s on 2 rank"),
        ([2, 2], "124 samples/s on 2 rank"),
        ([2, 3, 1, 2, 1], "124 samples/s on 1 to 3 ranks"),
        ([], "124 samples/s on 4 rank"),
    ],
)
def test_a_speed_is_of_the_ranks_that_were_there(sizes: list[int], told: str) -> None:
    assert told in summary(_result(sizes=sizes), RankInfo(size=4))


@pytest.mark.parametrize("reason", ["stop_at", "SIGTERM", "SIGINT", "finished"])
def test_a_command_takes_a_stop_back_only_where_one_was_asked_for(reason: str) -> None:
    text = summary(_result(reason=reason), RankInfo())
    assert ("--train.stop_at null" in text) == (reason == "stop_at")
    assert ("  continue " in text) == (reason == "stop_at")
