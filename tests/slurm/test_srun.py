"""srun on a real Slurm: ranks that find each other by PMI, and without it over Gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hvdtrain.launch.hosts import node_names
from hvdtrain.launch.spec import Container, JobSpec, Mpi
from hvdtrain.launch.targets import schedulers as target
from hvdtrain.observe.past_journal import read_steps
from tests.support.containers import make_image, make_runtime
from tests.support.host import Host, command_of
from tests.support.journals import read_events, read_losses
from tests.support.launch import ROOT, train
from tests.support.slurm import Slurm

TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=8", "--train.global_batch=8", "--train.micro_batch=2"]
LONG = [*TOY, "--train.steps=1000000", "--checkpoint.every=0", "--run_dir=run"]
PATHS = {"PYTHONPATH": str(ROOT)}

HEARS_SIGINT = "trap 'touch heard' INT; touch ready; while :; do sleep 0.1; done"
WAITS = "srun --ntasks=1 bash -c 'touch busy; sleep 1000' & exec \"$@\""

WHO = """
import json, os
names = [f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")]
import horovod.torch as hvd
hvd.init()
own = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
assert own == [int(os.environ[name]) for name in names]
store = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
print(json.dumps([*own, os.environ["HOROVOD_GLOO_IFACE"], os.environ["SLURMD_NODENAME"], store]))
"""


def command(*arguments: str, slurm_mpi: str, ranks: int = 2, **more: object) -> list[str]:
    spec = JobSpec(arguments, ranks, python=sys.executable, mpi=Mpi("openmpi", "4.1.8"), slurm_mpi=slurm_mpi)
    return list(target.render_srun(replace(spec, **more)).argv)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    train(*TOY, "--run_dir=run", cwd=folder)
    return read_losses(folder / "run")


def assert_trained_on_two_ranks(run: Path, alone: list[float]) -> None:
    assert [event["size"] for event in read_events(run, "started")] == [2]
    assert read_losses(run) == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("slurm_mpi", ["pmix", ""], ids=["pmix", "gloo"])
def test_ranks_of_srun_train_as_one_process_does(
    slurm_mpi: str, slurm: Slurm, alone: list[float], tmp_path: Path
) -> None:
    argv = ["salloc", "--ntasks=2", *command(*TOY, "--run_dir=it's a run", slurm_mpi=slurm_mpi)]
    done = slurm.run(argv, cwd=tmp_path, environment=PATHS)
    assert_trained_on_two_ranks(tmp_path / "it's a run", alone)
    assert done.stdout.count("finished at step 8 of 8") == 1


@pytest.mark.parametrize("slurm_mpi", ["pmix", ""], ids=["pmix", "gloo"])
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_ranks_train_in_containers(
    runtime: str, slurm_mpi: str, slurm: Slurm, alone: list[float], tmp_path: Path
) -> None:
    """With stand-ins of both: Python packages of the host do not reach the image's Python."""
    image = make_image(tmp_path)
    programs = make_runtime(tmp_path, *(("srun", str(shutil.which("srun"))) if runtime == "pyxis" else ()))
    more = {"container": Container(str(image), runtime), "folder": str(tmp_path)}
    of_host = {"PYTHONPATH": f"{ROOT}:/of-host", "VIRTUAL_ENV": "/of-host"}
    argv = ["salloc", "--ntasks=2", *command(*TOY, "--run_dir=run", slurm_mpi=slurm_mpi, **more)]
    slurm.run(argv, cwd=tmp_path, environment={**of_host, "PATH": f"{programs}:{os.environ['PATH']}"})
    assert_trained_on_two_ranks(tmp_path / "run", alone)
    of_python = (image / "environment").read_text()
    assert "PYTHONNOUSERSITE=1\n" in of_python and "/of-host" not in of_python


@pytest.mark.parametrize("to", ["srun", "hvdtrain"])
def test_a_step_starts_ranks_as_an_allocation_does(to: str, slurm: Slurm, alone: list[float], tmp_path: Path) -> None:
    """As in the shell of ``srun --pty bash``: srun would wait for ever for the cores of the step around it."""
    launch = [sys.executable, "-m", "hvdtrain", "launch", "--to", to, "-np", "2", "--", *TOY, "--run_dir=run"]
    slurm.run(["salloc", "--ntasks=2", "srun", "--ntasks=1", *launch], cwd=tmp_path, environment=PATHS)
    assert_trained_on_two_ranks(tmp_path / "run", alone)


def test_a_rank_for_each_gpu_which_it_must_find(slurm: Slurm, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "hvdtrain", "launch", "--gpus_per_node", "2", "--cpus_per_rank", "1", "--"]
    argv = ["salloc", "--gpus-per-node=2", "--cpus-per-task=2", *launch, *TOY, "--run_dir=run"]
    done = slurm.run(argv, cwd=tmp_path, environment=PATHS, check=False)
    for words in (" --ntasks=2 ", "--gpus-per-node=2 --cpus-per-task=1 --distribution=block:block"):
        assert words in done.stderr
    assert done.returncode != 0 and "torch finds no CUDA device" in done.stderr


def test_ranks_without_pmi_are_refused_with_a_fix(slurm: Slurm, tmp_path: Path) -> None:
    """Open MPI aborts in C where srun starts it without PMI: that has to be said before."""
    argv = ["srun", "--mpi=none", "--ntasks=2", sys.executable, "-m", "hvdtrain", *TOY]
    done = slurm.run(argv, cwd=tmp_path, environment=PATHS, check=False)
    assert done.returncode != 0
    assert "hvdtrain launch --to srun" in done.stderr


def test_nodes_with_unlike_numbers_of_tasks_are_one_job(two_nodes: Slurm, tmp_path: Path) -> None:
    """Two ranks on one node, one on the other: of those that are the second of their node there is one alone."""
    task = [sys.executable, "-m", "hvdtrain.launch.slurm_task", sys.executable, "-c", WHO]
    srun = ["srun", "--mpi=none", "--nodes=2", "--ntasks=3", *task]
    argv = ["salloc", "--nodes=2", "--ntasks=3", sys.executable, "-m", "hvdtrain.launch.srun_job", *srun]
    done = two_nodes.run(argv, cwd=tmp_path, environment=PATHS)
    told = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    stores = [one.pop() for one in told]
    assert stores[0] == stores[1] != stores[2] and all(store.startswith("127.0.0.1:") for store in stores)
    assert told == [
        [0, 3, 0, 2, 0, 2, "link0", "a"],
        [1, 3, 1, 2, 0, 1, "link0", "a"],
        [2, 3, 0, 1, 1, 2, "link0", "b"],
    ]


@contextmanager
def training(slurm: Slurm, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Two ranks over Gloo, some steps old."""
    argv = ["salloc", "--quiet", "--ntasks=2", *command(*LONG, slurm_mpi="")]
    journal = folder / "run/journal.jsonl"
    with slurm.popen(argv, cwd=folder) as process:
        try:
            slurm.until(lambda: journal.exists() and len(read_steps(journal)) > 3, "steps")
            yield process
        finally:
            slurm.clear()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_ranks_save_and_goes_to_no_other_step(
    number: signal.Signals, slurm: Slurm, tmp_path: Path
) -> None:
    journal = tmp_path / "run/journal.jsonl"
    with training(slurm, tmp_path) as process:
        (job,) = slurm.run(["squeue", "--noheader", "--format=%A"]).stdout.split()
        other = ["srun", f"--jobid={job}", "--overlap", "--ntasks=1", "bash", "-c", HEARS_SIGINT]
        with slurm.popen(other, cwd=tmp_path) as another:
            slurm.until((tmp_path / "ready").exists, "another step")
            _python(slurm.first, "hvdtrain.launch.srun_job").send_signal(number)
            said = process.communicate(timeout=100)[0]
            another.communicate(timeout=100)
    assert not (tmp_path / "heard").exists()
    assert process.returncode == 128 + number, said
    assert f"stopped by {number.name}" in said
    step = max(read_steps(journal))
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == [f"step-{step:06d}"]


def test_a_job_without_started_ranks_ends_at_once(slurm: Slurm, tmp_path: Path) -> None:
    """Another step has the only task of the allocation, and srun waits for it."""
    job = command(*TOY, "--run_dir=run", slurm_mpi="", ranks=1)
    with slurm.popen(["salloc", "--quiet", "--ntasks=1", "bash", "-c", WAITS, "bash", *job], cwd=tmp_path) as process:
        try:
            slurm.until((tmp_path / "busy").exists, "another step")
            slurm.until(lambda: any(map(_asks_for_ranks, slurm.first.processes())), "srun")
            own = _python(slurm.first, "hvdtrain.launch.srun_job")
            own.send_signal(signal.SIGTERM)
            own.wait(timeout=30)
        finally:
            slurm.clear()
            process.communicate(timeout=100)
    assert not (tmp_path / "run").exists()


def test_the_secret_of_the_store_is_on_no_command_line(slurm: Slurm, tmp_path: Path) -> None:
    with training(slurm, tmp_path):
        rank = _python(slurm.first, "hvdtrain")
        secret = rank.environ()["HOROVOD_GLOO_RENDEZVOUS_ADDR"].split("/")[1]
        lines = [command_of(pid) for pid in slurm.first.processes()]
    assert any("hvdtrain.launch.srun_job" in words for words in lines)
    assert len(secret) > 40
    assert not any(secret in word for words in lines for word in words)


@pytest.mark.parametrize(
    "text", ["n1", "n[01-04,7],m3-[1-2]", "a[1-2]b[3-4]", "x[001-003],z", "r[8-11]", "a.b-c[0-1]", "n[1,3,5]"]
)
def test_lists_of_hosts_are_read_as_slurm_reads_them(text: str, slurm: Slurm) -> None:
    assert node_names(text) == slurm.run(["scontrol", "show", "hostnames", text]).stdout.split()


def _asks_for_ranks(pid: int) -> bool:
    words = command_of(pid)
    return words[:1] == ["srun"] and "hvdtrain.launch.slurm_task" in words


def _python(host: Host, module: str) -> psutil.Process:
    """The first Python on the host that runs a module."""
    found = [pid for pid in sorted(host.processes()) if command_of(pid)[:3] == [sys.executable, "-m", module]]
    return psutil.Process(found[0])
