"""Ranks that divide matrices or experts train as one rank, and their checkpoints fit any mesh and engine."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.observe.past_journal import read_steps
from hvdtrain.spans import JOURNAL_KEYS
from tests.laws.test_fsdp import check_equal, train_whole
from tests.support.divided_models import DIVIDED, FOUR, STAGES, TWO, of_variant
from tests.support.gallery import Gallery, Recorded

JOBS = {f"{ranks}/{name}": each for ranks, names in (("two", TWO), ("four", FOUR)) for name, each in names.items()}


def _recorded(gallery: Gallery, job: str) -> Recorded:
    """Of ``two/NAME``, ``four/NAME`` or ``halves/NAME``."""
    kind, _, name = job.partition("/")
    ranks, parts = kind.replace("halves", "two"), "layers" if "pp" in name.partition("/")[0] else "matrices"
    folder = gallery[f"{ranks}_{parts}"].folder
    return Recorded(folder / (job if kind == "halves" else name), 0, "", "")


def _gradients(job: Recorded) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.run / "timeline/gradients.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_law_9_parameters_are_those_of_one_rank(job: str, gallery: Gallery, tmp_path: Path) -> None:
    """Plain SGD, most of them: a wrong factor of a gradient shows in its parameter. Rounded sums have nearly it."""
    one = train_whole(tmp_path, *of_variant(job.rpartition("/")[2]), common=DIVIDED)
    if any(each.startswith(("--precision=", "--parallel.compression=")) for each in JOBS[job]):
        rel = 5e-3 if "powersgd" in job else 5e-4
        assert _recorded(gallery, job).losses() == pytest.approx(one.losses(), rel=rel)
    else:
        check_equal(one, _recorded(gallery, job))


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_law_10_a_run_goes_on_with_other_dimensions(name: str, gallery: Gallery, tmp_path: Path) -> None:
    found = Recorded(gallery["resized"].folder / name, 0, "", "")
    assert [event["size"] for event in found.events("started")] == [2, 4, 1]
    assert len({event["parameters"] for event in found.events("started")}) == 1
    check_equal(train_whole(tmp_path, *STAGES[name][2], *of_variant("longer"), common=DIVIDED), found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TWO if "adamw" in name])
def test_law_2_a_resumed_run_has_the_same_bits(name: str, gallery: Gallery) -> None:
    found, expected = _recorded(gallery, f"halves/{name}"), _recorded(gallery, f"two/{name}")
    assert len(found.events("started")) == 2
    assert found.losses() == expected.losses()
    for group, tensors in expected.state().tensors.items():
        for key, tensor in tensors.items():
            assert torch.equal(found.state().tensors[group][key], tensor), key


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp2", "ep2", "cp2", "pp2"])
def test_waits_for_activations_are_a_part_of_the_step(mesh: str, gallery: Gallery) -> None:
    """Those of torch's tensor parallelism are not seen."""
    steps = [*read_steps(_recorded(gallery, f"two/{mesh}/latent+longer").run / "journal.jsonl").values()]
    assert steps and all((step["activations_s"] > 0) == (mesh != "tp2") for step in steps)
    for step in steps:
        parts = [step[key] for key in JOURNAL_KEYS.values()]
        assert min(parts) >= 0 and sum(parts) <= step["step_s"]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "copies"), [("tp2", {1}), ("ep2", {1, 2}), ("cp2", {2}), ("pp2", {1})])
def test_what_predictions_need_is_recorded(mesh: str, copies: set[int], gallery: Gallery, tmp_path: Path) -> None:
    """Rank 0 has a part of some parameters, or of the layers."""
    whole = _gradients(train_whole(tmp_path, *of_variant("longer"), "--observe.timeline=auto", common=DIVIDED))
    found = _gradients(_recorded(gallery, f"two/{mesh}/latent+longer"))
    assert {each["copies"] for each in found["parameters"]} == copies
    assert len(found["steps"]) == 2  # of six
    for step in found["steps"]:
        known = [us for us in step["ready_us"] if us is not None]
        assert 0.9 * len(found["parameters"]) <= len(known) <= len(found["parameters"])
        assert 0 < min(known) <= max(known) <= step["backward_us"]
    sizes, every = ({e["name"]: math.prod(e["shape"]) for e in f["parameters"]} for f in (found, whole))
    assert all(size in (every[name], every[name] / 2) for name, size in sizes.items())
    assert (sizes == every) == (mesh == "cp2") and (sizes.keys() < every.keys()) == (mesh == "pp2")


@pytest.mark.slow
def test_experts_are_on_their_ranks_only(gallery: Gallery) -> None:
    """Each rank writes what it holds: half of the experts, or of the matrices; the rest is written once."""
    for name in ("two/ep2/latent+longer", "two/tp2/latent+longer"):
        (saved,) = (_recorded(gallery, name).run / "checkpoints").glob("step-000006")
        sizes = [file.stat().st_size for file in saved.glob("model-*.safetensors")]
        assert len(sizes) == 2 and max(sizes) < 0.75 * sum(sizes)
