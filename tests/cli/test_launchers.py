"""The same job under every launcher, and what signals and dying ranks do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.observe.journal import read_journal, read_steps
from tests.support.launch import ENVIRONMENT, command, ending, train

TOY = [
    f"--task={Path(__file__).parents[1]}/support/toy.py:toy",
    "--train.steps=8",
    "--train.global_batch=8",
    "--train.micro_batch=2",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the job in one process without launcher."""
    folder = tmp_path_factory.mktemp("alone")
    train(*TOY, "--run_dir=run", cwd=folder)
    return [line["loss"] for line in read_steps(folder / "run/journal.jsonl").values()]


@pytest.mark.parametrize(
    "launcher", ["mpirun", pytest.param("horovodrun", marks=pytest.mark.slow), "horovodrun --gloo"]
)
def test_launchers_give_the_same_job(launcher: str, alone: list[float], tmp_path: Path) -> None:
    done = train(*TOY, "--run_dir=run", size=2, launcher=launcher, cwd=tmp_path)
    lines = read_journal(tmp_path / "run/journal.jsonl")
    assert [line["size"] for line in lines if line.get("event") == "started"] == [2]
    losses = [line["loss"] for line in read_steps(tmp_path / "run/journal.jsonl").values()]
    assert losses == pytest.approx(alone, rel=1e-6)
    assert done.stdout.count("finished at step 8 of 8") == 1
    assert "\x1b[" not in done.stdout


def test_one_process_never_imports_horovod(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['horovod'] = None\nfrom hvdtrain.__main__ import main\n"
        f"sys.exit(main({[*TOY, '--run_dir=run']!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16", "bf16"))]
)
def test_more_ranks_than_micro_batches_works_and_says_so(precision: str, tmp_path: Path) -> None:
    done = train(*TOY, "--train.micro_batch=8", "--run_dir=run", f"--precision={precision}", size=2, cwd=tmp_path)
    assert "1 of 2 ranks idle" in done.stdout
    assert len(read_steps(tmp_path / "run/journal.jsonl")) == 8


LONG = [*TOY[:1], "--train.steps=1000000", "--train.global_batch=8", "--train.micro_batch=2", "--checkpoint.every=0"]


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[str]]]:
    """Jobs that a test started; those still there at its end are ended."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def _start(jobs: list[subprocess.Popen[str]], folder: Path, size: int, *options: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT.get("PATH", "")])
    launcher = command(size, launcher="mpirun" if size > 1 else "none")
    process = subprocess.Popen(
        [*launcher, sys.executable, "-m", "hvdtrain", *LONG, "--run_dir=run", *options],
        cwd=folder,
        env={**ENVIRONMENT, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    jobs.append(process)
    journal = folder / "run/journal.jsonl"
    _until(lambda: journal.exists() and len(read_steps(journal)) > 3, process)
    return process


def _until(condition, process: subprocess.Popen[str], patience_s: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + patience_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def _checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run/checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("size", "workers"),
    [(2, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (1, 1), (2, 0)))],
)
def test_sigusr1_saves_and_goes_on_sigterm_saves_and_stops(size: int, workers: int, jobs: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    """mpirun sends what it gets to all processes of the job, loader processes too."""
    process = _start(jobs, tmp_path, size, f"--loader.workers={workers}")
    process.send_signal(signal.SIGUSR1)
    _until(lambda: len(_checkpoints(tmp_path)) == 1, process)
    at = int(_checkpoints(tmp_path)[0][5:])
    _until(lambda: max(read_steps(tmp_path / "run/journal.jsonl")) > at + 3, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143 or (size > 1 and process.returncode != 0), output
    last = ending(tmp_path / "run/journal.jsonl")
    assert last.get("reason") == "SIGTERM", f"{last}\n{output}"
    step = max(read_steps(tmp_path / "run/journal.jsonl"))
    assert _checkpoints(tmp_path)[-1] == f"step-{step:06d}"
    done = train(*LONG, "--run_dir=run", f"--train.stop_at={step + 2}", cwd=tmp_path)
    assert f"going on from step {step}" in done.stdout


def test_ctrl_c_saves_and_stops(jobs: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    process = _start(jobs, tmp_path, 1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "stopped by SIGINT" in output
    assert len(_checkpoints(tmp_path)) == 1


FAILING = """
import os
import torch
from hvdtrain import Task

def build():
    model = torch.nn.Linear(1, 1)
    def loss(model, batch):
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            raise RuntimeError("rank 1 has had enough")
        return model(batch[0]).sum(), 1
    return Task(model, loss, torch.utils.data.TensorDataset(torch.ones(8, 1)))
"""


def test_a_failure_on_one_rank_ends_the_job_and_names_the_rank(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    start = time.monotonic()
    done = train("--task=failing.py:build", size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    assert "rank 1 on " in done.stderr
    assert time.monotonic() - start < 60


def test_parameters_that_drift_apart_end_the_job(tmp_path: Path) -> None:
    """Law 3 on a real job: rank 1's model writes to its own parameter."""
    drifting = FAILING.replace('raise RuntimeError("rank 1 has had enough")', "model.bias.data += 1e-6")
    (tmp_path / "drifting.py").write_text(drifting)
    done = train("--task=drifting.py:build", "--train.steps=2", size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "bias differs on rank(s) 1" in done.stderr


def test_a_wrong_option_that_one_rank_alone_sees_is_told(tmp_path: Path) -> None:
    only_there = "raise __import__('hvdtrain.errors').errors.ConfigError('not on this host')"
    (tmp_path / "unlike.py").write_text(FAILING.replace('raise RuntimeError("rank 1 has had enough")', only_there))
    done = train("--task=unlike.py:build", size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "not on this host" in done.stderr


def test_wrong_input_is_told_once(tmp_path: Path) -> None:
    done = train(*TOY, "--train.stpes=3", size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert done.stderr.count("did you mean --train.steps?") == 1
    (tmp_path / "file").write_text("")
    done = train(*TOY, "--run_dir=file/run", size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert done.stderr.count("cannot be used") == 1


def test_data_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    samples = "torch.ones(8 + int(os.environ['OMPI_COMM_WORLD_RANK']), 1)"
    (tmp_path / "unlike.py").write_text(FAILING.replace("torch.ones(8, 1)", samples))
    done = train("--task=unlike.py:build", size=2, cwd=tmp_path, check=False)
    assert done.returncode != 0
    assert "rank 1 has other data than rank 0" in done.stderr
