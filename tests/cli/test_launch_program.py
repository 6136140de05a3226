"""``hvdtrain launch -- PROGRAM``: a program of the user's as a job, by our own driver and by the other targets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvdtrain.cli.launch import main
from hvdtrain.cli.launch_options import parse
from hvdtrain.cli.launch_spec import plan_of, spec_of
from hvdtrain.launch import own_task
from hvdtrain.launch.choose import OWN, Choice
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.targets import TARGETS
from hvdtrain.runtime.channel import LIFELINE, VARIABLE
from tests.support import jobs
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, program

PATHS = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"}
TELL = 'import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("HOROVOD_", "HVD"))}))'


def spec(*words: str, target: str = OWN, options: Sequence[str] = ()) -> JobSpec:
    return spec_of(parse(["-np", "2", *options, "--", *words]), Choice(target, None, ""), Machine(), {})


def launch(folder: Path, *words: str, to: str = OWN, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hvdtrain", "launch", "--to", to, "-np", "2", *options, "--", *words]
    return subprocess.run(argv, cwd=folder, env=PATHS, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ((), [sys.executable, "-m", "hvdtrain"]),
        (("--train.steps", "3"), [sys.executable, "-m", "hvdtrain", "--train.steps", "3"]),
        (("train", "--seed=1"), [sys.executable, "-m", "hvdtrain", "train", "--seed=1"]),
        (("python", "-c", "1"), [sys.executable, "-c", "1"]),
        (("python3", "script.py"), [sys.executable, "script.py"]),
        (("sh", "-c", "python"), ["sh", "-c", "python"]),
    ],
)
def test_the_first_word_decides_what_ranks_run(words: tuple[str, ...], ran: list[str]) -> None:
    assert list(spec(*words).program) == ran


@pytest.mark.parametrize(
    ("words", "next_step"), [(("script.py",), "-- python script.py"), (("./nothing", "1"), "-- ./NAME")]
)
def test_a_missing_program_is_named(words: tuple[str, ...], next_step: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--to", "hvdtrain", "-np", "2", "--", *words]) == 2
    said = capsys.readouterr().err
    assert f"no program {words[0]} on this machine" in said and next_step in said


def test_a_container_may_have_programs_that_are_not_here() -> None:
    assert spec("./nothing", target="mpijob").program == ("./nothing",)


def test_a_program_is_requeued_only_on_request() -> None:
    assert [spec(*words).batch.requeues for words in ((), ("sh",))] == [20, 0]
    assert spec("sh", options=("--requeues", "3")).batch.requeues == 3


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_starts_it_and_promises_no_checkpoint(target: str) -> None:
    mpi = {"mpich": jobs.MPICH, "intelmpi": jobs.INTEL}.get(target, jobs.OPEN_MPI_4)
    made = jobs.queued(mpi) if TARGETS[target].elsewhere or target in ("slurm", "pbs", "lsf") else jobs.one(mpi)
    shown = str(TARGETS[target].render(replace(made, arguments=("python", "my script.py"), is_program=True)))
    assert "my script.py" in shown and "-m hvdtrain " not in shown and '"hvdtrain",' not in shown
    assert "/bin/python" in shown
    if target in ("pbs", "lsf"):
        assert "checkpoint" not in shown and "timeout" not in shown


def test_the_others_may_work_on_when_one_has_ended() -> None:
    options = parse(["-np", "2", "--", "sh"])
    assert plan_of([], options, spec("sh"), {}).limits.grace_s == float("inf")
    assert plan_of([], options, spec(), {}).limits.grace_s < float("inf")


def test_options_of_the_driver_are_limits_of_the_job() -> None:
    names = ("restarts", "reset_limit", "hang_timeout", "elastic_timeout", "start_timeout", "gloo_timeout")
    options = parse(["-np", "2", "--elastic", "1:4", *(f"--{name}={n}" for n, name in enumerate(names, 3)), "--"])
    limits = plan_of([], options, spec_of(options, Choice(OWN, None, ""), Machine(), {}), {}).limits
    assert [getattr(limits, name.replace("timeout", "timeout_s")) for name in names] == [3, 4, 5, 6, 7, 8]
    assert (limits.start, limits.least, limits.most, limits.elastic) == (2, 1, 4, True)


def test_with_elastic_it_speaks_to_the_driver_itself() -> None:
    words = ["-np", "2", "--elastic", "1:2", "--", "python", "script.py"]
    made = spec_of(parse(words), Choice(OWN, None, ""), Machine(), {})
    assert plan_of(words, parse(words), made, {}).program == (sys.executable, "script.py")


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("exit 0", 0, ["finished"]),
        ("exit 7", 7, []),
        ("exit 143", 143, []),
        ("kill -TERM $PPID; exec sleep 1000", 143, ["SIGTERM"]),
        ("trap 'exit 143' TERM; kill -TERM $PPID; while :; do sleep 0.01; done", 143, ["SIGTERM"]),
    ],
)
def test_the_driver_hears_how_it_ended(
    script: str, code: int, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that reached the rank alone is no failure. The program sends it to its parent, which forwards it."""
    driver = Mock(is_broken=lambda: False, join=lambda why: Mock(variables=dict))
    monkeypatch.setattr(own_task, "connect_to_driver", lambda variables: driver)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        assert own_task.main(["sh", "-c", script]) == code
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    assert [call.args[0] for call in driver.report_leaving.call_args_list] == told


def test_it_finds_its_place_as_under_horovodrun(tmp_path: Path) -> None:
    done = launch(tmp_path, "python", "-c", TELL, options=("--tag",))
    assert done.returncode == 0, done.stderr
    told = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert sorted((facts["HOROVOD_RANK"], facts["HOROVOD_SIZE"]) for facts in told) == [("0", "2"), ("1", "2")]
    assert all(facts["HOROVOD_CONTROLLER"] == "gloo" and facts["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for facts in told)
    assert not {"HOROVOD_ELASTIC", VARIABLE, LIFELINE} & {name for facts in told for name in facts}


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    done = launch(tmp_path, "sh", "-c", "[ $HOROVOD_RANK = 0 ] || exit 7; sleep 1000")
    assert done.returncode == 1 and "rank 1 on localhost ended with exit code 7" in done.stderr
    assert "did not end in time" not in done.stderr


def test_a_rank_that_fails_last_fails_the_job(tmp_path: Path) -> None:
    waits = "until [ -s zero ]; do sleep 0.05; done; while kill -0 $(cat zero) 2>/dev/null; do sleep 0.05; done"
    script = f"if [ $HOROVOD_RANK = 0 ]; then echo $PPID > zero; else {waits}; exit 7; fi"
    done = launch(tmp_path, "sh", "-c", script)
    assert done.returncode == 1 and "rank 1 on localhost ended with exit code 7" in done.stderr


def test_signals_reach_it(tmp_path: Path) -> None:
    script = "trap 'echo heard; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    argv = [sys.executable, "-m", "hvdtrain", "launch", "--to", OWN, "-np", "2", "--", "sh", "-c", script]
    with subprocess.Popen(argv, cwd=tmp_path, env=PATHS, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert [job.stdout.readline().split()[-1] for _ in range(2)] == ["ready", "ready"]
        os.kill(job.pid, signal.SIGTERM)
        rest = job.stdout.read()
    assert job.returncode == 128 + signal.SIGTERM and rest.count("heard") == 2


SUM = """
import sys, torch
import {module} as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
sys.stdout.write(f"SUM {{hvd.size()}} {{total}}\\n")  # in one piece, which horovodrun leaves whole
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["horovod.torch", "hvdtrain.torch"])
@pytest.mark.parametrize("to", [OWN, "openmpi", "horovodrun"])
def test_ranks_of_horovod_meet(module: str, to: str, tmp_path: Path) -> None:
    program("mpirun" if to != OWN else "horovodrun")
    (tmp_path / "sum.py").write_text(SUM.format(module=module))
    done = launch(tmp_path, "python", "sum.py", to=to)
    assert done.returncode == 0 and done.stdout.count("SUM 2 3.0") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_an_elastic_program_of_stock_horovod_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM.format(module="horovod.torch"))
    done = launch(tmp_path, "python", "sum.py", options=("--elastic", "1:2", "--gloo-timeout", "2"))
    assert done.returncode == 1 and "call hvdtrain.torch's init and elastic.run; or use --to horovodrun" in done.stderr
