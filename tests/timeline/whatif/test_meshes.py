"""Predictions of ranks that divide a model, from a run of ranks that divide it in the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plan.plan import Ranks
from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import GBIT, MIB, PARTS, SHAPES, run_folder

BATCH = {"global_batch": 16, "micro_batch": 4}
ALONE = dict.fromkeys(SHAPES, 1)
COMPUTED_S = (PARTS["copy"] + PARTS["forward"] + PARTS["backward"]) / 1e3


def _parallel(**dimensions: object) -> dict[str, dict[str, object]]:
    return {"parallel": {"compression": "none", **dimensions}, "train": BATCH}


def _group(path: Path, size: int = 2, *, copies: Any = ALONE, passes: int = 1, **dimensions: object) -> Evidence:
    """A run of ranks of one host that divide a model."""
    options = _parallel(**dimensions)
    return read_evidence(run_folder(path, size=size, local_size=size, options=options, copies=copies, passes=passes))


@pytest.mark.parametrize(
    ("dimension", "copies", "more"),
    [("tp", ALONE, 1.0), ("cp", {}, 1.5), ("ep", {**ALONE, "a": 2, "b": 2}, 1.25)],
)
def test_copies_of_a_group_exchange_what_ranks_do(tmp_path: Path, dimension: str, copies: Any, more: float) -> None:
    """What two groups of two ranks sum is summed by two ranks that are alone; of experts, by half of the ranks.

    In a ring, four ranks send 3/2 of the bytes of two: of all gradients, or of half of them.
    """
    alone = read_evidence(run_folder(tmp_path / "alone", options={"train": BATCH}, passes=4))
    group = _group(tmp_path / "group", copies=copies, passes=4, **{dimension: 2})
    expected = predict(alone, Change(size=2, bandwidth_gbit=1.0, ranks_per_host=1)).then
    found = predict(group, Change(size=4, bandwidth_gbit=1.0, ranks_per_host=2))
    assert found.then.handed_bytes == expected.handed_bytes == 8 * MIB + 4 * 512
    assert found.then.wire_s == pytest.approx(more * expected.wire_s, rel=0.01)
    if dimension == "tp":
        assert found.now.handed_bytes == 0
        assert found.then.step_s == pytest.approx(expected.step_s, rel=1e-3)


def test_experts_that_no_other_rank_has_are_not_sent(tmp_path: Path) -> None:
    evidence = _group(tmp_path / "run", copies={"a": 1, "b": 1}, passes=2, ep=2)
    assert predict(evidence, Change()).now.handed_bytes == 4 * MIB + 4 * 512
    with_copies = predict(evidence, Change(size=4, ranks_per_host=4))
    assert with_copies.then.handed_bytes == 8 * MIB + 4 * 512


@pytest.mark.parametrize(("stages", "batch"), [(2, 64), (4, 32), (4, 64)])
def test_stages_wait_as_long_as_their_passes_less_one(tmp_path: Path, stages: int, batch: int) -> None:
    evidence = _group(tmp_path / "run", stages, passes=4, pp=stages)
    found = predict(evidence, Change(global_batch=batch))
    more = PARTS["data"] / 1e3 * (batch / 16 - 1)
    ratio = (batch / 4 + stages - 1) / (4 + stages - 1)
    assert found.then.step_s - evidence.step_s - more == pytest.approx(COMPUTED_S * (ratio - 1), rel=1e-3)
    assert any(f"{stages - 1} pass(es)" in note for note in found.notes)


def test_ranks_of_a_host_that_sum_a_part(tmp_path: Path) -> None:
    evidence = _group(tmp_path / "run", 8, copies=dict.fromkeys(SHAPES, 2), tp=2, pp=2)
    assert (evidence.job.passes, evidence.job.plan.summing(evidence.job.ranks, 2 / 8)) == (2, Ranks(2, 2))
    over = predict(evidence, Change(size=32, ranks_per_host=8, bandwidth_gbit=10.0, global_batch=128)).job
    summing = over.plan.summing(over.ranks, 2 / 8)
    assert (over.passes, summing) == (4, Ranks(8, 4))  # of 16 ranks of a stage, 8 are on a host


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Change(engine="ddp"), "another engine, shard or sync"),
        (Change(shard="optimizer"), "another engine, shard or sync"),
        (Change(sync="diloco:8", workers=2), "another engine, shard or sync"),
        (Change(size=3), "--parallel.tp 2"),
        (Change(size=4, ranks_per_host=1, bandwidth_gbit=1.0), "activations between hosts"),
    ],
)
def test_what_the_run_does_not_show_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        predict(_group(tmp_path / "run", tp=2), change)


def test_groups_that_leave_or_reach_the_network_are_refused(tmp_path: Path) -> None:
    across = read_evidence(run_folder(tmp_path / "across", size=2, options=_parallel(tp=2), copies=ALONE))
    both = _group(tmp_path / "both", 6, copies={}, passes=2, cp=3, ep=2)
    for evidence, change in ((across, Change(ranks_per_host=2)), (both, Change(ranks_per_host=3, bandwidth_gbit=1.0))):
        with pytest.raises(ConfigError, match="activations between hosts"):
            predict(evidence, change)


def test_the_ranks_of_one_mesh_on_several_hosts_say_nothing_about_sums(tmp_path: Path) -> None:
    """They wait for each other without a sum of gradients; the link was probed."""
    waiting = {"size": 2, "options": _parallel(pp=2), "copies": ALONE, "passes": 4, "wait_ms": 15.0}
    probed = read_evidence(run_folder(tmp_path / "probed", **waiting, link=GBIT))
    unknown = read_evidence(run_folder(tmp_path / "unknown", **waiting))
    apart = Change(size=4, global_batch=32, ranks_per_host=1)
    assert probed.copy_s_per_byte is None
    assert 8e-9 / probed.fitted.link.s_per_byte == pytest.approx(1.0, rel=0.1)
    found = predict(probed, apart)
    assert 0.03 < found.then.step_s - found.now.step_s < 0.2
    assert unknown.fitted.link is None and predict(unknown, Change()).then.step_s == unknown.step_s
    with pytest.raises(ConfigError, match="link between 4 hosts"):
        predict(unknown, apart)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 2, "shard": "optimizer"}, "does not record"),
        ({"tp": 2, "engine": "fsdp"}, "does not record"),
        ({"pp": 2, "virtual_stages": 2}, "does not record"),
        ({"engine": "fsdp"}, r"does not record(.|\n)*--engine fsdp"),
        ({"shard": "optimizer", "compression": "int8"}, "shard optimizer with compression int8"),
    ],
)
def test_runs_without_the_times_of_gradients_are_refused(tmp_path: Path, options: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said):
        _group(tmp_path / "run", **options)


def test_marks_after_the_engine_say_nothing_about_packing(tmp_path: Path) -> None:
    _group(tmp_path / "run", copies={}, ep=2)
    file = tmp_path / "run" / "timeline" / "gradients.json"
    found = json.loads(file.read_text())
    for step in found["steps"]:
        step["packed_us"] = [us + 1.0 for us in step["ready_us"]]
    file.write_text(json.dumps(found))
    evidence = read_evidence(tmp_path / "run")
    assert evidence.copy_s_per_byte is None
    notes = predict(evidence, Change(compression="fp16")).notes
    assert any(note.startswith("cost of coding: estimated") for note in notes)
