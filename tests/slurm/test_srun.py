"""srun on a real Slurm: ranks that find each other by PMI."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.launch.hosts import node_names
from hvdtrain.launch.spec import Container, JobSpec, Mpi
from hvdtrain.launch.targets import schedulers as target
from tests.support.containers import make_image, make_runtime
from tests.support.journals import read_events, read_losses
from tests.support.launch import ROOT, train
from tests.support.slurm import Slurm

TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=8", "--train.global_batch=8", "--train.micro_batch=2"]
PATHS = {"PYTHONPATH": str(ROOT)}


def command(*arguments: str, **more: object) -> list[str]:
    spec = JobSpec(arguments, 2, python=sys.executable, mpi=Mpi("openmpi", "4.1.8"), slurm_mpi="pmix")
    return list(target.render_srun(replace(spec, **more)).argv)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    train(*TOY, "--run_dir=run", cwd=folder)
    return read_losses(folder / "run")


def assert_trained_on_two_ranks(run: Path, alone: list[float]) -> None:
    assert [event["size"] for event in read_events(run, "started")] == [2]
    assert read_losses(run) == pytest.approx(alone, rel=1e-6)


def test_ranks_of_srun_train_as_one_process_does(slurm: Slurm, alone: list[float], tmp_path: Path) -> None:
    argv = ["salloc", "--ntasks=2", *command(*TOY, "--run_dir=it's a run")]
    done = slurm.run(argv, cwd=tmp_path, environment=PATHS)
    assert_trained_on_two_ranks(tmp_path / "it's a run", alone)
    assert done.stdout.count("finished at step 8 of 8") == 1


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_ranks_train_in_containers(runtime: str, slurm: Slurm, alone: list[float], tmp_path: Path) -> None:
    """With stand-ins of both: Python packages of the host do not reach the image's Python."""
    image = make_image(tmp_path)
    programs = make_runtime(tmp_path, *(("srun", str(shutil.which("srun"))) if runtime == "pyxis" else ()))
    more = {"container": Container(str(image), runtime), "folder": str(tmp_path)}
    of_host = {"PYTHONPATH": f"{ROOT}:/of-host", "VIRTUAL_ENV": "/of-host"}
    argv = ["salloc", "--ntasks=2", *command(*TOY, "--run_dir=run", **more)]
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
    assert "next: hvdtrain launch, which uses Gloo" in done.stderr


@pytest.mark.parametrize(
    "text", ["n1", "n[01-04,7],m3-[1-2]", "a[1-2]b[3-4]", "x[001-003],z", "r[8-11]", "a.b-c[0-1]", "n[1,3,5]"]
)
def test_lists_of_hosts_are_read_as_slurm_reads_them(text: str, slurm: Slurm) -> None:
    assert node_names(text) == slurm.run(["scontrol", "show", "hostnames", text]).stdout.split()
