"""Whatever is done to the files of a checkpoint, it is never loaded as something that was not saved."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from hvdtrain.errors import CheckpointError, UnreadableCheckpointError
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.manifest import detect_unreadable
from hvdtrain.state.pieces import StateDict
from tests.support.checkpoints import same_state, save_in_parts
from tests.support.damage import DAMAGES


def _state(seed: int) -> StateDict:
    torch.manual_seed(seed)
    model = {f"layer{n}.{part}": torch.randn(4, 5) for n in range(3) for part in ("weight", "bias")}
    model |= {"embedding": torch.randn(30, 7).bfloat16(), "mask": torch.randn(9) > 0}
    slots = {f"{name}/{slot}": torch.randn(4, 5) for name in list(model)[:6] for slot in ("exp_avg", "exp_avg_sq")}
    slots |= {f"{name}/step": torch.tensor(float(seed)) for name in model}
    values = {"progress": {"step": 7, "position": 70 + seed, "losses": [1.5, 2.5]}, "aliases": {"head": "embedding"}}
    return StateDict({"model": model, "optimizer": slots}, values)


def _save(folder: Path, seed: int, writers: int) -> Path:
    return save_in_parts(CheckpointStore(folder, pytest.fail), 7, _state(seed), writers, divided=False)


@pytest.fixture(params=[1, 3], ids=lambda writers: f"{writers} writers")
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Two of the same step, names and sizes."""
    return _save(tmp_path / "one", 1, request.param), _save(tmp_path / "two", 2, request.param)


def _outcome(folder: Path, saved: StateDict) -> str:
    """What loading gives: the same, or an error that names a file of it. Anything else fails."""
    try:
        found = load(folder)
    except CheckpointError as error:
        named = str(folder) in str(error)
        return "named" if named else f"an error that names nothing: {error}"
    return "the same" if same_state(found, saved) else "something else"


MANY = [pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(1, 6)]


@pytest.mark.parametrize(("count", "seed"), [(150, 0), *MANY])
def test_no_damage_is_loaded_silently(checkpoints: tuple[Path, Path], tmp_path: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    whole, other = checkpoints
    saved = load(whole)
    assert same_state(saved, _state(1))
    outcomes: Counter[tuple[str, str]] = Counter()
    for number in range(count):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, folder)
        damage = chance.choice(DAMAGES)
        damage(chance, folder, other)
        outcome = _outcome(folder, saved)
        assert outcome in ("named", "the same"), f"{damage.__name__}, number {number}: {outcome}"
        outcomes[damage.__name__, outcome] += 1
        shutil.rmtree(folder)
    harmless = {name for name, outcome in outcomes if outcome == "the same"}
    assert harmless <= {"add", "lengthen", "edit_json", "change_bytes", "edit_header"}, harmless
    assert {name for name, outcome in outcomes if outcome == "named"} >= {"flip_a_bit", "cut", "swap", "edit_json"}


def test_another_step_under_the_name_is_passed_over(tmp_path: Path) -> None:
    warnings: list[str] = []
    _save(tmp_path, 1, 1).rename(tmp_path / "step-000009")
    assert CheckpointStore(tmp_path, warnings.append).load_newest() is None
    assert "instead of step" in warnings[0]


@pytest.mark.parametrize(("number", "said"), [(errno.EMFILE, "ulimit -n"), (errno.EACCES, "allow this user")])
def test_too_many_open_files_are_no_lack_of_permission(number: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError) as caught, detect_unreadable(tmp_path):
        raise OSError(number, os.strerror(number), "model.safetensors")
    assert said in str(caught.value)
