"""The predicted step of a job that does not run is that of `timeline whatif`; which way is proposed, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hvdtrain.cli.fit import _with_step, main
from hvdtrain.config.parse import RunConfig, parse_argv
from hvdtrain.errors import ConfigError
from hvdtrain.fit.memory import Memory
from hvdtrain.fit.step_time import StepTimes
from hvdtrain.fit.ways import GIB, Line, propose
from hvdtrain.task.base import load_task_function
from hvdtrain.timeline.whatif.evidence import Change
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.stack import STACK
from tests.support.whatif_run import SHAPES, run_folder

JOB = (*STACK, "--method=adamw", "--train.global_batch=8", "--train.micro_batch=4")


def _parsed(*more: str) -> RunConfig:
    return parse_argv([*JOB, *more], load_task_function(JOB[0].partition("=")[2]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a run of two hosts with the options of `JOB`."""
    made = run_folder(tmp_path / "run", size=2, wait_ms=9.0, state_bytes=(8, 0))
    (made / "config.yaml").write_text(yaml.safe_dump(dict(_parsed().resolved)))
    return made


@pytest.mark.parametrize(
    ("options", "ranks", "change"),
    [
        ((), 16, Change(size=16, bandwidth_gbit=10.0)),
        (("--parallel.shard=gradients",), 4, Change(size=4, bandwidth_gbit=10.0, shard="gradients")),
        (("--parallel.compression=int8",), 4, Change(size=4, bandwidth_gbit=10.0, compression="int8")),
        (("--train.global_batch=64", "--seed=3"), 2, Change(bandwidth_gbit=10.0, global_batch=64)),
        ((), 1, Change(size=1)),
    ],
)
def test_a_step_is_what_whatif_predicts(path: Path, options: tuple[str, ...], ranks: int, change: Change) -> None:
    found = StepTimes.of_run(path, 10.0, None).predict(_parsed(*options), ranks)
    assert found.then == predict(read_evidence(path), change).then


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--train.micro_batch=2", "train.micro_batch"),
        ("--precision=bf16", "precision"),
        ("--memory.checkpointing=full", "memory.checkpointing"),
        ("--method=sgd", "method"),
        ("--optimizer.name=muon", "optimizer.name"),
    ],
)
def test_a_job_that_computes_something_else_is_refused(path: Path, option: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} differs") as refused:
        StepTimes.of_run(path, None, None).predict(_parsed(option), 2)
    assert refused.value.found == option.partition("=")[2]


@pytest.mark.parametrize(
    "options", [("--parallel.tp=2",), ("--parallel.cp=2",), ("--parallel.engine=fsdp", "--parallel.dp_shard=2")]
)
def test_ranks_that_divide_otherwise_are_refused(path: Path, options: tuple[str, ...]) -> None:
    name, _, value = options[-1].partition("=")
    with pytest.raises(ConfigError, match=f"{path} does not predict a step with {name} {value}"):
        StepTimes.of_run(path, 10.0, None).predict(_parsed(*options), 4)


@pytest.mark.parametrize("mesh", ["tp", "cp", "pp"])
def test_a_mesh_is_predicted_from_a_run_of_it(path: Path, tmp_path: Path, mesh: str) -> None:
    other = run_folder(tmp_path / "mesh", size=2, local_size=2, copies=dict.fromkeys(SHAPES, 1))
    (other / "config.yaml").write_text(yaml.safe_dump(dict(_parsed(f"--parallel.{mesh}=2").resolved)))
    run = _parsed(f"--parallel.{mesh}=2", "--train.global_batch=32")
    found = StepTimes.of_run(other, None, None).predict(run, 4)
    assert found.then == predict(read_evidence(other), Change(size=4, global_batch=32)).then
    line = Line(4, "none", "none", None)
    both = [StepTimes.of_run(each, 10.0, None) for each in (path, other)]
    assert _with_step(line, both, run).step_s == found.then.step_s
    assert _with_step(line, both, _parsed("--parallel.ep=2")).no_step.count("does not predict a step with") == 2


def test_the_table_has_the_step(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--run", str(path), "--ranks", "1", "--checkpointing", "none,full", "--gib", "80", *JOB]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    predicted = StepTimes.of_run(path, None, None).predict(_parsed(), 1)
    assert lines[2].endswith(f" {1e3 * predicted.then.step_s:,.1f}  fits") and lines[3].endswith(" -  fits")
    assert "memory.checkpointing differs" in lines[4]
    with pytest.raises(ConfigError, match="name a run of this model"):
        main(["--bandwidth_gbit", "10", *JOB])


SMALL = Line(2, "none", "none", Memory(0, 0, GIB // 2))
LARGE = Line(2, "optimizer", "none", Memory(0, 0, 2 * GIB))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ((), "nothing else was tried"),
        ((LARGE,), "nothing else fits"),
        ((LARGE, replace(SMALL, mesh="ep2", memory=Memory(0, 0, 1, waited_for=1))), "of 2 ways that fit"),
        ((replace(LARGE, memory=None, refused="no part"),), "nothing else fits"),
    ],
)
def test_a_proposal_says_what_else_there_is(others: tuple[Line, ...], why: str) -> None:
    lines, reasons = propose([SMALL, *others], 1.0)
    assert [line.proposed for line in lines] == [True, *(False for _ in others)]
    assert "--parallel.shard none" in reasons[0] and why in reasons[1]
    assert propose([LARGE], 1.0) == ([LARGE], [])


def test_a_proposal_by_time_says_how_many_times_there_are() -> None:
    timed = [replace(SMALL, mesh=mesh, step_s=step_s) for mesh, step_s in (("tp2", 2.0), ("ep2", 1.0))]
    lines, reasons = propose([SMALL, *timed], 1.0)
    assert [line.proposed for line in lines] == [False, False, True]
    assert "of 3 ways" in reasons[1] and "of 2 with" in reasons[1]
