"""The same job under every launcher, and what signals and dying ranks do to it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdtrain import Task
from hvdtrain.errors import LaunchError
from hvdtrain.observe.past_journal import read_steps
from tests.support.gallery import STEPS, Gallery
from tests.support.gallery import TOY as GALLERY_TOY
from tests.support.launch import ROOT, ending, train, training
from tests.support.thread_job import train_on_threads
from tests.support.toy import toy

TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=8", "--train.global_batch=8", "--train.micro_batch=2"]


@pytest.mark.parametrize("name", ["two", pytest.param("gloo", marks=pytest.mark.slow)])
def test_launchers_give_the_same_job(name: str, gallery: Gallery) -> None:
    job = gallery[name]
    assert [line["size"] for line in job.events("started")] == [2]
    assert job.losses() == pytest.approx(gallery["one"].losses(), rel=1e-6)
    assert job.out.count(f"finished at step {STEPS} of {STEPS}") == 1
    assert "\x1b[" not in job.out


@pytest.mark.slow
def test_horovodrun_gives_the_same_job(gallery: Gallery, tmp_path: Path) -> None:
    train(*GALLERY_TOY, size=2, launcher="horovodrun", cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)})
    losses = [line["loss"] for line in read_steps(tmp_path / "run/journal.jsonl").values()]
    assert losses == pytest.approx(gallery["one"].losses(), rel=1e-6)


def test_one_process_never_imports_horovod(gallery: Gallery) -> None:
    assert "there is no Horovod here" in (gallery["one"].folder / "horovod.py").read_text()
    assert gallery["one"].code == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_more_ranks_than_micro_batches_work(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_on_threads(*TOY, "--train.micro_batch=8", f"--run_dir={tmp_path}", f"--precision={precision}", size=2)
    said = capsys.readouterr().out.partition("step 1/")[0]
    assert "1 of 2 ranks are idle" in said and "50% of the ranks' time" in said and "--train.global_batch 16" in said
    assert len(read_steps(tmp_path / "journal.jsonl")) == 8


LONG = [TOY[0], "--train.steps=1000000", "--train.global_batch=8", "--train.micro_batch=2", "--checkpoint.every=0"]
LONG += ["--run_dir=run", "--observe.line_every_s=0.3"]


def _checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run/checkpoints").glob("step-*"))


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (1, 0)])
@pytest.mark.slow
def test_sigusr1_saves_and_continues_sigterm_saves_and_stops(size: int, workers: int, tmp_path: Path) -> None:
    """mpirun sends what it gets to all processes of the job, loader processes too."""
    # mpirun kills the ranks one second after it was told to end, saved or not. Here they have longer.
    patient = {"OMPI_MCA_odls_base_sigkill_timeout": "15"}
    options = (*LONG, f"--loader.workers={workers}")
    with training(*options, size=size, cwd=tmp_path, after=4, environment=patient, forks=False) as process:
        assert process.stdout is not None
        steps = (int(line.split("/")[0].split()[1]) for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGUSR1)
        next(step for step in steps if _checkpoints(tmp_path))
        saved = int(_checkpoints(tmp_path)[0][5:])
        next(step for step in steps if step > saved + 3)
        process.send_signal(signal.SIGTERM)
        output = process.stdout.read()
    assert process.returncode == 143 or (size > 1 and process.returncode != 0), output
    assert ending(tmp_path / "run/journal.jsonl").get("reason") == "SIGTERM", output
    step = max(read_steps(tmp_path / "run/journal.jsonl"))
    assert len(_checkpoints(tmp_path)) == 2 and _checkpoints(tmp_path)[-1] == f"step-{step:06d}"
    done = train(*LONG, f"--train.stop_at={step + 2}", cwd=tmp_path)
    assert f"resuming from step {step}" in done.stdout


@pytest.mark.slow
def test_ctrl_c_saves_and_stops(tmp_path: Path) -> None:
    with training(*LONG, size=1, cwd=tmp_path, after=4) as process:
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()  # type: ignore[union-attr]
    assert process.returncode == 130 and "stopped by SIGINT" in output and len(_checkpoints(tmp_path)) == 1


@pytest.mark.slow
def test_wrong_input_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong, said in (("--train.stpes=3", "did you mean --train.steps?"), ("--run_dir=file/run", "cannot be used")):
        done = train(*TOY, wrong, size=2, cwd=tmp_path, check=False)
        assert done.returncode != 0 and done.stderr.count(said) == 1


def test_data_that_differs_between_ranks_is_named(tmp_path: Path) -> None:
    def unlike(rank: int) -> Task:
        return toy(samples=8 + rank)

    with pytest.raises(LaunchError, match="the data of rank 1 differs from that of rank 0"):
        train_on_threads(*TOY, f"--run_dir={tmp_path}", size=2, build=unlike)
