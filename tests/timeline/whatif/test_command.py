"""``hvdtrain timeline whatif`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.timeline import main
from hvdtrain.compression.coding_cost import CodingCost
from hvdtrain.compression.coding_probe import main as probe
from hvdtrain.compression.table import parse
from hvdtrain.timeline.whatif import probing
from hvdtrain.timeline.whatif.evidence import Change, changed_job
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.launch import ROOT, run, train
from tests.support.whatif_run import PARTS, run_folder

COMPUTED_S = (PARTS["copy"] + PARTS["forward"] + PARTS["backward"]) / 1e3
TOY = (f"--task={ROOT / 'tests/support/toy.py'}:toy", "--train.global_batch=8", "--train.micro_batch=4")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run", size=2, wait_ms=9.0)


def shown(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What a command shows as text, and what as JSON."""
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    return text, json.loads(capsys.readouterr().out)


def test_text_and_json_say_the_same(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--size", "64", "--bandwidth_gbit", "10", "--compression", "powersgd:4"]
    text, found = shown(["whatif", str(pair), *asked], capsys)
    assert found["change"] == {"size": 64, "bandwidth_gbit": 10.0, "compression": "powersgd:4"}
    assert found["low_s"] < found["then"]["step_s"] < found["high_s"]
    assert f"{found['then']['step_s'] * 1e3:.0f} ms" in text and " ".join(asked) in text
    assert all(note in text for note in found["notes"])
    assert any("extrapolated" in note for note in found["notes"])


def test_another_engine_is_predicted_with_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder(tmp_path / "run", size=2, wait_ms=9.0, state_bytes=(8, 0))
    text, found = shown(["whatif", str(path), "--shard", "optimizer"], capsys)
    assert "shard optimizer" in text and "parameter gather, exposed" in text and "a rank holds: parameters" in text
    assert found["held_bytes"]["then"]["state"] == pytest.approx(found["held_bytes"]["now"]["state"] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--engine", "ddp", "--compression", "topk"], 1, "--parallel.compression topk"),
        (["--engine", "star"], 2, "invalid choice"),
        (["--compression", "zip"], 1, "invalid compression 'zip'"),
        (["--size", "many"], 2, "invalid int value"),
    ],
)
def test_the_fault_is_reported(
    pair: Path, options: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(probing.CodingProbe, "measure", lambda *_: None)
    try:
        assert main(["whatif", str(pair), *options]) == code
    except SystemExit as ended:
        assert ended.code == code
    assert said in capsys.readouterr().err


def test_costs_are_measured_once_and_kept(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(compression, ranks, buckets, threads, beside):  # type: ignore[no-untyped-def]
        asked.append(str(compression))
        ways = [len(bucket.collectives(compression, ranks)) for bucket in buckets]
        names = [len(bucket.names) for bucket in buckets]
        return [CodingCost([1e-3] * k, [0.0] * n, [0.0] * n, 0.01, 0.0) for k, n in zip(names, ways, strict=True)]

    monkeypatch.setattr(probing, "_measure", ask)
    evidence = read_evidence(pair)
    coded = changed_job(evidence, Change(compression="int8"))
    for _ in range(2):
        probing.CodingProbe(pair).measure(evidence, [evidence.job, coded])
    assert asked == ["none", "int8"]
    for job in (coded, evidence.job):
        cost = probing.CodingProbe(pair)(parse(job.plan.compression), evidence.buckets_of(job)[0], 2)
        assert cost.after_s == 0.01
    (pair / "timeline" / "probe.json").write_text('{"version": 0}')
    probing.CodingProbe(pair).measure(evidence, [evidence.job])
    assert asked == ["none", "int8", "none"], "made anew"


def test_without_torch_measuring_says_what_to_do(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.sys, "executable", "/bin/false")
    with pytest.raises(Exception, match="--probe"):
        probing.CodingProbe(pair).measure(read_evidence(pair), [read_evidence(pair).job])


def test_a_probe_answers_what_it_is_asked(tmp_path: Path) -> None:
    buckets = [{"parts": [["m", [64, 64], 0], ["v", [10], 4096]], "length": 4112, "dtype": "float32"}]
    asked = {"compression": "topk:0.1", "ranks": 2, "threads": 1, "buckets": buckets}
    (tmp_path / "asked").write_text(json.dumps(asked))
    probe(tmp_path / "asked", tmp_path / "answer")
    (found,) = json.loads((tmp_path / "answer").read_text())
    assert (len(found["pack_s"]), len(found["before_s"])) == (2, 1)


@pytest.mark.slow
def test_a_real_run_unchanged_takes_what_it_took(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(*TOY, f"--run_dir={path}", "--train.steps=30", "--observe.tensorboard=false", cwd=tmp_path)
    unchanged = run(["-m", "hvdtrain", "timeline", "whatif", str(path), "--json"], cwd=tmp_path)
    found = json.loads(unchanged.stdout)
    evidence = read_evidence(path)
    assert found["then"]["step_s"] == pytest.approx(evidence.step_s)
    assert [g.name for g in evidence.gradients if g.ready_s is None] == ["idle.weight", "idle.bias"]
