"""When held-out samples are looked at, and what checkpoints know of it."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.state.checkpoint_store import MANIFEST
from tests.support.journals import read_events, read_losses
from tests.support.toy import toy

pytestmark = pytest.mark.usefixtures("own_folder")


def _train(run: str, every: int, **options: Any) -> dict[int, float]:
    """Losses of the run's evaluations by step."""
    train = {"steps": 10, "global_batch": 4, "micro_batch": 2, **options}
    hvdtrain.train({"train": train, "checkpoint": {"every": every, "keep": 9}, "run_dir": run}, toy)
    events = read_events(run, "evaluation")
    found = {event["at_step"]: event["loss"] for event in events}
    assert len(found) == len(events), "no step is evaluated twice"
    return found


def _saved(run: str) -> dict[int, float | None]:
    """What checkpoints know of held-out loss, by step."""
    manifests = [json.loads((path / MANIFEST).read_text()) for path in Path(run, "checkpoints").glob("step-*")]
    return {manifest["step"]: manifest["heldout_loss"] for manifest in manifests}


@pytest.mark.parametrize(
    ("eval_every", "every", "steps"),
    [
        (None, 4, [0, 4, 8, 10]),
        (None, 0, [0, 10]),
        (3, 4, [0, 3, 6, 9, 10]),
        (4, 4, [0, 4, 8, 10]),
        (5, 0, [0, 5, 10]),
        (99, 4, [0, 10]),
    ],
)
def test_steps_and_checkpoints(eval_every: int | None, every: int, steps: list[int]) -> None:
    found = _train("run", every, eval_every=eval_every)
    assert sorted(found) == steps
    saved = _saved("run")
    assert sorted(saved) == ([4, 8, 10] if every else [10])
    assert saved == {step: found.get(step) for step in saved}


def test_a_resumed_run_evaluates_at_the_same_steps() -> None:
    """And looking more often changes no training."""
    whole = _train("whole", 0, eval_every=4)
    _train("parts", 0, eval_every=4, stop_at=5)
    parts = _train("parts", 0, eval_every=4)
    assert sorted(parts) == [0, 4, 5, 8, 10]
    assert whole == {step: parts[step] for step in whole}
    _train("often", 0, eval_every=1)
    assert read_losses("often") == read_losses("parts") == read_losses("whole")


def test_an_invalid_interval() -> None:
    with pytest.raises(hvdtrain.HvdtrainError, match=r"--train.eval_every is "):
        _train("run", 0, eval_every=0)


@pytest.mark.parametrize("steps", [10, 5])
def test_a_stop_by_signal_is_not_kept_waiting(steps: int) -> None:
    """mpirun kills one second after SIGTERM: the checkpoint comes first, also of the last step."""

    def schedule(step: int) -> float:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    train = {"steps": steps, "global_batch": 4, "micro_batch": 2, "eval_every": 1}
    options = {"train": train, "checkpoint": {"every": 1}, "run_dir": "run"}
    result = hvdtrain.train(options, replace(toy(), schedule=schedule))
    assert result.reason == "SIGTERM"
    assert [event["at_step"] for event in read_events("run", "evaluation")] == list(range(result.step))
    assert _saved("run")[result.step] is None
