"""``hvdtrain timeline whatif`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.cli.timeline import main
from hvdtrain.compression.coding_cost import CodingCost
from hvdtrain.compression.coding_probe import main as probe
from hvdtrain.compression.table import parse
from hvdtrain.timeline.whatif import probing
from hvdtrain.timeline.whatif.engine_buckets import job_buckets
from hvdtrain.timeline.whatif.evidence import Change, changed_job
from hvdtrain.timeline.whatif.read_run import read_evidence
from hvdtrain.timeline.whatif.trying import reasons_against, trial_command, trial_options
from tests.support.launch import ROOT, run, train
from tests.support.whatif_run import run_folder

TOY = (f"--task={ROOT / 'tests/support/toy.py'}:toy", "--train.global_batch=8", "--train.micro_batch=4")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run", size=2, wait_ms=9.0)


def test_text_and_json_say_the_same(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["whatif", str(pair), "--size", "64", "--bandwidth_gbit", "10", "--compression", "powersgd:4"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["change"] == {"size": 64, "bandwidth_gbit": 10.0, "compression": "powersgd:4"}
    assert found["low_s"] < found["then"]["step_s"] < found["high_s"]
    assert f"{found['then']['step_s'] * 1e3:.0f} ms" in text
    assert "--size 64 --bandwidth_gbit 10 --compression powersgd:4" in text
    assert all(note in text for note in found["notes"])
    assert any("extrapolated" in note for note in found["notes"])
    assert "not in the model" in text


def test_another_engine_is_predicted_with_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_folder(tmp_path / "run", size=2, wait_ms=9.0, state_bytes=(8, 0))
    asked = ["whatif", str(path), "--shard", "optimizer"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "2 ranks on 2 hosts, shard optimizer, compression none" in text
    assert "parameter gather, exposed" in text and "a rank holds: parameters" in text
    assert main([*asked, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["held_bytes"]
    assert held["then"]["state"] == pytest.approx(held["now"]["state"] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--engine", "ddp", "--shard", "optimizer"], 1, "--engine ddp --shard optimizer cannot be predicted"),
        (["--engine", "ddp", "--compression", "topk"], 1, "does not support --parallel.compression topk"),
        (["--engine", "star"], 2, "invalid choice"),
        (["--compression", "zip"], 1, "invalid compression 'zip'"),
        (["--size", "0"], 1, "--size"),
        (["--bandwidth_gbit", "1", "--check"], 1, "--bandwidth_gbit: needs other hosts"),
        (["--size", "many"], 2, "invalid int value"),
        (["--algorithm", "star"], 2, "invalid choice"),
    ],
)
def test_the_fault_is_reported(
    pair: Path, options: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(probing.CodingProbe, "measure", lambda *_: None)
    try:
        assert main(["whatif", str(pair), *options]) == code
    except SystemExit as ended:
        assert ended.code == code
    assert said in capsys.readouterr().err


def test_what_cannot_be_tried_here_is_known_before(pair: Path, tmp_path: Path) -> None:
    reasons = reasons_against(read_evidence(pair), Change(latency_us=5.0, data_ms=0.0, algorithm="ring"))
    assert len(reasons) == 5, "three options, and two jobs on two hosts"
    here = read_evidence(run_folder(tmp_path / "here", cores=2))
    assert reasons_against(here, Change(size=2, compression="int8", bucket_mib=1.0, slow_rank_percent=10.0)) == []
    assert reasons_against(here, Change(size=3, ranks_per_host=3)) != []


def test_a_try_of_an_engine_names_its_shard(tmp_path: Path) -> None:
    evidence = read_evidence(run_folder(tmp_path / "run", size=2, options={"parallel": {"shard": "gradients"}}))
    assert trial_options(evidence, Change(engine="ddp"), tmp_path) == ["--parallel.engine=ddp", "--parallel.shard=none"]


def test_a_try_is_an_argument_list(tmp_path: Path) -> None:
    found = trial_command(tmp_path / "a run", tmp_path / "try", 2, ["--parallel.compression=int8"])
    assert found[1:6] == ["-m", "hvdtrain.cli.start", "-np", "2", "--"]
    assert str(tmp_path / "a run" / "config.yaml") in found
    assert found[-1] == "--parallel.compression=int8"
    assert trial_command(tmp_path, tmp_path / "try", 1, [])[1:4] == ["-m", "hvdtrain", "--config"]


def test_costs_are_measured_once_and_kept(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(compression, ranks, buckets, threads, beside):  # type: ignore[no-untyped-def]
        asked.append(len(buckets))
        ways = [len(bucket.collectives(compression, ranks)) for bucket in buckets]
        return [
            CodingCost([1e-3] * len(b.names), [0.0] * n, [0.0] * n, 0.01, 0.0)
            for b, n in zip(buckets, ways, strict=True)
        ]

    monkeypatch.setattr(probing, "_measure", ask)
    evidence = read_evidence(pair)
    probing.CodingProbe(pair).measure(evidence, [evidence.job])
    probing.CodingProbe(pair).measure(evidence, [evidence.job])
    assert len(asked) == 1
    coded, plain = (changed_job(evidence, Change(compression=name)) for name in ("int8", "none"))
    probing.CodingProbe(pair).measure(evidence, [coded, plain])
    after_s = [
        cost.after_s
        for job in (coded, plain)
        if (cost := probing.CodingProbe(pair)(parse(job.compression), job_buckets(evidence, job)[0], 2)) is not None
    ]
    assert after_s == pytest.approx([0.01, 0.01])
    assert main(["whatif", str(pair), "--json"]) == 0
    (pair / "timeline" / "probe.json").write_text('{"version": 0}')
    probing.CodingProbe(pair).measure(evidence, [evidence.job])
    assert probing.CodingProbe(pair)(parse("none"), job_buckets(evidence, evidence.job)[0], 2) is not None, "made anew"


def test_without_torch_measuring_says_what_to_do(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing.sys, "executable", "/bin/false")
    with pytest.raises(Exception, match="--probe"):
        probing.CodingProbe(pair).measure(read_evidence(pair), [read_evidence(pair).job])


def test_a_probe_answers_what_it_is_asked(tmp_path: Path) -> None:
    parts = [["m", [64, 64], 0], ["v", [10], 4096]]
    asked = {"compression": "topk:0.1", "ranks": 2, "threads": 1}
    (tmp_path / "asked").write_text(
        json.dumps({**asked, "buckets": [{"parts": parts, "length": 4112, "dtype": "float32"}]})
    )
    probe(tmp_path / "asked", tmp_path / "answer")
    (found,) = json.loads((tmp_path / "answer").read_text())
    assert len(found["pack_s"]) == 2
    assert len(found["before_s"]) == 1


@pytest.mark.slow
def test_a_real_run_unchanged_takes_what_it_took_and_a_change_can_be_tried(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(*TOY, f"--run_dir={path}", "--train.steps=30", "--observe.tensorboard=false", cwd=tmp_path)
    unchanged = run(["-m", "hvdtrain", "timeline", "whatif", str(path), "--json"], cwd=tmp_path)
    found = json.loads(unchanged.stdout)
    evidence = read_evidence(path)
    assert found["then"]["step_s"] == pytest.approx(evidence.step_s)
    assert [g.name for g in evidence.gradients if g.ready_s is None] == ["idle.bias", "idle.weight"]
    tried = run(
        ["-m", "hvdtrain", "timeline", "whatif", str(path), "--compression", "fp16", "--check", "--json"], cwd=tmp_path
    )
    check = json.loads(tried.stdout)["check"]
    assert [len(check[name]) for name in ("unchanged_s", "changed_s", "predicted_s")] == [2, 2, 2]
    assert all(seconds > 0 for name in check for seconds in check[name])


@pytest.mark.slow
def test_a_rank_can_be_made_slow(tmp_path: Path) -> None:
    """As a try does it: the same task and options, with a sleep before the loss on one rank."""
    file = tmp_path / "slowed.py"
    spec = f"{ROOT / 'tests/support/toy.py'}:toy"
    file.write_text(f"from hvdtrain.task.base import slowed\ntask = slowed({spec!r}, 0, 0.02)\n")
    options = ("--hidden=8", "--train.global_batch=8", "--train.micro_batch=4", "--train.steps=8")
    train(f"--task={file}:task", *options, f"--run_dir={tmp_path / 'run'}", cwd=tmp_path)
    lines = map(json.loads, (tmp_path / "run" / "journal.jsonl").read_text().splitlines())
    assert all(line["forward_s"] >= 0.04 for line in lines if "step" in line)
