"""Reading the records of a run, and the errors where they are not enough."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hvdtrain.errors import DataError
from hvdtrain.timeline.whatif.links import Ranks
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.whatif_run import PARTS, SHAPES, run_folder


def test_a_typical_step_and_the_order_of_its_gradients(tmp_path: Path) -> None:
    evidence = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=7.0))
    assert evidence.step_s * 1e3 == pytest.approx(sum(PARTS.values()) + 7)
    assert sum(evidence.parts_s.values()) == pytest.approx(evidence.step_s)
    assert [g.name for g in evidence.gradients] == list(SHAPES)[::-1]
    assert evidence.job.ranks == Ranks(2, 1)
    assert evidence.tail_s == pytest.approx(0.02)
    assert evidence.step_uncertainty_s == 0, "all steps are alike"


def test_a_run_that_drifts_is_uncertain_by_its_drift(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    head, *steps = (path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in steps]
    for number, record in enumerate(records):
        record["step_s"] *= 1.2 if number >= len(records) // 2 + 1 else 1.0
    (path / "journal.jsonl").write_text("\n".join([head, *map(json.dumps, records)]) + "\n")
    evidence = read_evidence(path)
    assert evidence.step_uncertainty_s >= 0.2 * sum(PARTS.values()) / 1e3


def test_only_the_last_start_counts_and_none_of_its_first_steps(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    lines = (path / "journal.jsonl").read_text().splitlines()
    slow = [json.dumps({**json.loads(line), "step_s": 9.0}) for line in lines[1:]]
    (path / "journal.jsonl").write_text("\n".join([lines[0], *slow, lines[0], *slow[:3], *lines[4:20]]) + "\n")
    evidence = read_evidence(path)
    assert evidence.step_s * 1e3 == pytest.approx(sum(PARTS.values()))
    assert len(evidence.jitter.deviations) == 16


def test_a_compression_that_was_chosen_is_that_of_the_run(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", size=2, options={"parallel": {"compression": "auto"}})
    chosen = json.dumps({"event": "compression_chosen", "at_step": 7, "compression": "fp16"})
    text = (path / "journal.jsonl").read_text().splitlines()
    (path / "journal.jsonl").write_text("\n".join([*text[:8], chosen, *text[8:]]) + "\n")
    assert read_evidence(path).job.compression == "fp16"


def test_a_micro_batch_that_was_found_is_that_of_the_run(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", options={"train": {"global_batch": 16, "micro_batch": "auto"}})
    with (path / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps({"event": "micro_batch_found", "samples": 8, "limited_by": []}) + "\n")
    assert read_evidence(path).job.micro_batches == 2


def test_a_divided_run_with_compression_is_refused(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", size=2, options={"parallel": {"shard": "optimizer", "compression": "int8"}})
    with pytest.raises(DataError, match=r"--parallel\.shard optimizer with compression int8"):
        read_evidence(path)


def test_what_a_probe_took_is_the_link(tmp_path: Path) -> None:
    pairs = [(1024, 1e-4), (1 << 20, 0.0091), (1 << 23, 0.0711)]
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, link=pairs)).fitted
    assert fitted.link is not None
    assert 8e-9 / fitted.link.s_per_byte == pytest.approx(0.94, rel=0.02)
    assert "probed" in fitted.source


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
    """A probe says 1 Gbit/s, by which 8 MiB take some 70 ms."""
    pairs = [(1024, 1e-4), (1 << 20, 0.0091), (1 << 23, 0.0711)]
    slower = read_evidence(run_folder(tmp_path / "slower", size=2, wait_ms=200.0, link=pairs)).fitted
    assert "slower than when it was probed" in slower.source
    assert slower.link is not None
    assert slower.link.s_per_byte * (8 << 20) == pytest.approx(0.24, rel=0.02)
    late = read_evidence(run_folder(tmp_path / "late", size=2, wait_ms=200.0, late_ms=190.0, link=pairs))
    assert late.late_s == pytest.approx(0.19)
    assert "probed" in late.fitted.source
    assert "slower" not in late.fitted.source


@pytest.mark.parametrize(("wait_ms", "was_slower"), [(35.0, False), (50.0, True)])
def test_it_is_so_from_a_twentieth_of_a_step_on(wait_ms: float, was_slower: bool, tmp_path: Path) -> None:
    """The probe explains waits of 30 ms, in steps of some 210."""
    pairs = [(1024, 1e-4), (1 << 20, 0.0091), (1 << 23, 0.0711)]
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=wait_ms, link=pairs)).fitted
    assert ("slower than when it was probed" in fitted.source) is was_slower


def test_without_a_probe_waits_tell_the_link(tmp_path: Path) -> None:
    """80 ms into backward all but 4 of 8 MiB are being sent; the rest at its end is the measured wait."""
    fitted = read_evidence(run_folder(tmp_path / "run", size=2, wait_ms=200.0)).fitted
    assert fitted.link is not None
    assert "waited" in fitted.source
    assert fitted.link.s_per_byte * (8 << 20) == pytest.approx(0.24, rel=0.02)


def test_what_is_missing_is_named_with_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder of an hvdtrain run"):
        read_evidence(tmp_path)
    few = run_folder(tmp_path / "few", steps=6)
    with pytest.raises(DataError, match="too few steps"):
        read_evidence(few)
    path = run_folder(tmp_path / "run")
    (path / "timeline" / "gradients.json").write_text('{"version": 99}')
    with pytest.raises(DataError, match="has format version 99"):
        read_evidence(path)
    (path / "timeline" / "gradients.json").unlink()
    with pytest.raises(DataError, match=r"--train\.stop_at"):
        read_evidence(path)
    (path / "journal.jsonl").unlink()
    (path / "timeline" / "gradients.json").write_text('{"version": 1}')
    with pytest.raises(DataError, match=r"journal\.jsonl"):
        read_evidence(path)


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("config.yaml", "[" * 3000, "not the folder of an hvdtrain run"),
        ("config.yaml", "&a [*a]", "not the folder of an hvdtrain run"),
        ("config.yaml", "a: 1", "is damaged, or was written by another program"),
        ("timeline/gradients.json", '{"version": 1}', "is damaged"),
        ("timeline/gradients.json", "[" * 100_000, "lacks a readable timeline/gradients.json"),
        ("journal.jsonl", '5\n[]\n{"step": 1}\n' * 9, "is damaged"),
    ],
)
def test_a_folder_with_other_content_is_an_error(file: str, content: str, what: str, tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run")
    (path / file).write_text(content)
    with pytest.raises(DataError, match=what):
        read_evidence(path)
