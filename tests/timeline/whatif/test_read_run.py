"""Reading the records of a run and Horovod's trace of it, and the errors where they are not enough."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import DataError
from hvdtrain.plan.gradients import finished
from hvdtrain.plan.plan import Ranks
from hvdtrain.timeline.whatif.evidence import Change
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import GBIT, MIB, PARTS, SHAPES, run_folder


def test_a_typical_step_and_the_order_of_its_gradients(tmp_path: Path) -> None:
    evidence = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=7.0))
    assert evidence.step_s * 1e3 == pytest.approx(sum(PARTS.values()) + 7)
    assert sum(evidence.parts_s.values()) == pytest.approx(evidence.step_s)
    assert [g.name for g in finished(evidence.gradients)] == list(SHAPES)[::-1]
    assert evidence.job.ranks == Ranks(2, 1)
    assert evidence.tail_s == pytest.approx(0.02)
    assert evidence.step_uncertainty_s == 0, "all steps are alike"


def test_a_run_that_drifts_is_uncertain_by_its_drift(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    head, *steps = (path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in steps]
    for record in records[len(records) // 2 + 1 :]:
        record["step_s"] *= 1.2
    (path / "journal.jsonl").write_text("\n".join([head, *map(json.dumps, records)]) + "\n")
    assert read_evidence(path).step_uncertainty_s >= 0.2 * sum(PARTS.values()) / 1e3


def test_only_the_last_start_counts_and_none_of_its_first_steps(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    lines = (path / "journal.jsonl").read_text().splitlines()
    slow = [json.dumps({**json.loads(line), "step_s": 9.0}) for line in lines[1:]]
    (path / "journal.jsonl").write_text("\n".join([lines[0], *slow, lines[0], *slow[:3], *lines[4:20]]) + "\n")
    evidence = read_evidence(path)
    assert evidence.step_s * 1e3 == pytest.approx(sum(PARTS.values()))
    assert len(evidence.jitter.deviations) == 16


def test_what_was_chosen_is_that_of_the_run(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", options={"parallel": {"compression": "auto"}})
    text = (path / "journal.jsonl").read_text().splitlines()
    event = {"at_step": 7, "event": "compression_chosen"}
    both = [json.dumps({**event, "compression": name}) for name in ("bf16", "fp16")]
    (path / "journal.jsonl").write_text("\n".join([*text[:8], *both, *text[8:]]) + "\n")
    assert read_evidence(path).job.plan.compression == "fp16"


def test_shares_by_speed_stay_in_proportion(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", size=2, passes=4)
    text = (path / "journal.jsonl").read_text().splitlines()
    before = [json.dumps({**json.loads(line), "step_s": 9.0}) for line in text[1:20]]
    shares = json.dumps({"event": "shares", "at_step": 19, "shares": [6, 2], "pass_s": [0.1, 0.3]})
    (path / "journal.jsonl").write_text("\n".join([text[0], *before, shares, *text[20:]]) + "\n")
    evidence = read_evidence(path)
    assert evidence.job.passes == 6 and evidence.step_s < 1, "of the steps with these shares"
    assert replace(evidence.job, global_batch=64).passes == 12
    assert replace(evidence.job, ranks=Ranks(4, 1)).passes == 3


@pytest.mark.parametrize("engine", ["horovod", "ddp"])
def test_where_nothing_is_packed_a_copy_that_the_run_has_made_is_what_packing_takes(
    engine: str, tmp_path: Path
) -> None:
    path = run_folder(
        tmp_path / "run", options={"parallel": {"compression": "none", "engine": engine}}, copied=(MIB, 500.0)
    )
    assert read_evidence(path).copy_s_per_byte == pytest.approx(500e-6 / MIB)
    assert read_evidence(run_folder(tmp_path / "old")).copy_s_per_byte is None


def test_what_a_probe_took_is_the_link(tmp_path: Path) -> None:
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, link=GBIT)).fitted
    assert 8e-9 / fitted.link.s_per_byte == pytest.approx(0.94, rel=0.02)
    assert "probed" in fitted.source


@pytest.mark.parametrize(("compression", "slower"), [("none", True), ("powersgd:4", False)])
def test_long_waits_say_that_the_link_is_slower_unless_they_may_be_for_coding(
    compression: str, slower: bool, tmp_path: Path
) -> None:
    options = {"parallel": {"compression": compression}}
    path = run_folder(tmp_path / "run", size=2, wait_ms=300.0, link=GBIT, options=options)
    assert ("slower than when it was probed" in read_evidence(path).fitted.source) == slower


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_a_noisy_probe_makes_a_wide_interval(tmp_path: Path, noise: float) -> None:
    """1 Gbit/s by all sizes; or every second size is slower by 60%."""
    sizes = [1024, *(1 << exponent for exponent in range(22, 27))]
    pairs = [(n, 1e-4 + n * 8e-9 * (1 + noise * (place % 2))) for place, n in enumerate(sizes)]
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, local_size=2, link=pairs)).fitted
    assert (fitted.uncertainty > 0.12) == (noise > 0)
    low, high = (float(each) for each in re.findall(r"\[([\d.]+) \.\. ([\d.]+)\]", fitted.source)[0])
    assert low < 1.0 < high and (high - low) / (high + low) == pytest.approx(fitted.uncertainty, rel=0.05)


def test_a_slower_link_is_distinguished_from_a_late_rank(tmp_path: Path) -> None:
    slower = read_evidence(run_folder(tmp_path / "slower", size=2, wait_ms=200.0, link=GBIT)).fitted
    assert "slower" in slower.source and slower.link is not None
    assert slower.link.s_per_byte * (8 << 20) == pytest.approx(0.24, rel=0.02)
    late = read_evidence(run_folder(tmp_path / "late", size=2, wait_ms=200.0, late_ms=190.0, link=GBIT))
    assert late.late_s == pytest.approx(0.19)
    assert "probed" in late.fitted.source and "slower" not in late.fitted.source


@pytest.mark.parametrize(("wait_ms", "was_slower"), [(35.0, False), (50.0, True)])
def test_it_is_so_from_a_twentieth_of_a_step_on(wait_ms: float, was_slower: bool, tmp_path: Path) -> None:
    """The probe explains waits of 30 ms, in steps of some 210."""
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=wait_ms, link=GBIT)).fitted
    assert ("slower" in fitted.source) is was_slower


def test_without_a_probe_waits_tell_the_link(tmp_path: Path) -> None:
    """80 ms into backward all but 4 of 8 MiB are being sent; the rest at its end is the measured wait."""
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=200.0)).fitted
    assert "waited" in fitted.source
    assert fitted.link.s_per_byte * (8 << 20) == pytest.approx(0.24, rel=0.02)


@pytest.mark.parametrize(
    ("steps", "files", "what"),
    [
        (30, {"config.yaml": None}, "not the folder of an hvdtrain run"),
        (6, {}, "too few steps"),
        (30, {"timeline/gradients.json": '{"version": 99}'}, "version 99"),
        (30, {"timeline/gradients.json": None}, r"--train\.stop_at"),
        (30, {"timeline/gradients.json": '{"version": 1}', "journal.jsonl": None}, r"journal\.jsonl"),
        (30, {"config.yaml": "[" * 3000}, "not the folder of an hvdtrain run"),
        (30, {"config.yaml": "&a [*a]"}, "not the folder of an hvdtrain run"),
        (30, {"config.yaml": "a: 1"}, "is damaged"),
        (30, {"timeline/gradients.json": '{"version": 1}'}, "is damaged"),
        (30, {"timeline/gradients.json": "[" * 100_000}, "timeline/gradients.json"),
        (30, {"journal.jsonl": '5\n[]\n{"step": 1}\n' * 9}, "is damaged"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    steps: int, files: dict[str, str | None], what: str, tmp_path: Path
) -> None:
    path = run_folder(tmp_path / "run", steps=steps)
    for name, content in files.items():
        (path / name).unlink() if content is None else (path / name).write_text(content)
    with pytest.raises(DataError, match=what):
        read_evidence(path)


def test_data_that_come_late_in_some_steps_only_count_by_their_mean(tmp_path: Path) -> None:
    """The medians of steps and of waits do not see them."""
    path = run_folder(tmp_path / "run", steps=43)
    head, *steps = (path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in steps]
    for record in records[3::4]:
        record["step_s"] += 0.2
        record["data_s"] += 0.2
    (path / "journal.jsonl").write_text("\n".join([head, *map(json.dumps, records)]) + "\n")
    evidence, usual_s = read_evidence(path), sum(PARTS.values()) / 1e3
    assert evidence.step_s == pytest.approx(usual_s + 0.05)
    assert sum(evidence.parts_s.values()) == pytest.approx(evidence.step_s)
    found = predict(evidence, Change(data_ms=0.0))
    assert found.now.step_s - found.then.step_s == pytest.approx(evidence.parts_s["data"], rel=0.01)
