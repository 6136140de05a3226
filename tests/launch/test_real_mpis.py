"""The command lines of the MPI targets, run by the real launchers of Open MPI 4 and 5, MPICH and Intel MPI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.launch.spec import Command, Container, JobSpec, Mpi
from hvdtrain.launch.targets import TARGETS
from tests.support.containers import make_image, make_runtime, starts
from tests.support.echo_python import echo_python
from tests.support.launch import ENVIRONMENT, TIMEOUT_S
from tests.support.mpis import NAMES, any_of

pytestmark = pytest.mark.slow

AWKWARD = ("a b", "it's", 'say "x"', "two\nlines", "$HOME `id` \\", "--", "*", "ü", "")


@pytest.fixture(params=NAMES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return any_of(str(request.param))


def spec(mpi: Mpi, folder: Path, ranks: int) -> JobSpec:
    python = echo_python(folder)
    return JobSpec(AWKWARD, ranks, python=python, mpi=mpi, is_root=os.geteuid() == 0, folder=str(folder))


def environment(mpi: Mpi, start: Command) -> dict[str, str]:
    folder = str(Path(mpi.mpirun).parent)
    return {**ENVIRONMENT, "PATH": f"{folder}:{ENVIRONMENT['PATH']}", **start.variables}


def told(output: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_get_their_arguments_and_environment(mpi: Mpi, ranks: int, tmp_path: Path) -> None:
    """More ranks than cores too, in a folder of an awkward name, and no rank is bound to a part of the cores."""
    folder = tmp_path / "it's\na folder"
    folder.mkdir()
    job = spec(mpi, folder, ranks)
    start = TARGETS[mpi.flavour].render(job)
    assert isinstance(start, Command)
    given = environment(mpi, start)
    done = subprocess.run(start.argv, cwd=folder, env=given, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    lines = told(done.stdout)
    assert [(line["rank"], line["size"], line["local_rank"]) for line in lines] == [(k, ranks, k) for k in range(ranks)]
    assert all(line["argv"] == ["-m", "hvdtrain", *AWKWARD] and line["cwd"] == str(folder) for line in lines)
    assert all(line["cores"] == len(os.sched_getaffinity(0)) for line in lines)


def test_a_shell_runs_the_shown_command(mpi: Mpi, tmp_path: Path) -> None:
    start = TARGETS[mpi.flavour].render(spec(mpi, tmp_path, 1))
    variables = {**ENVIRONMENT, "PATH": environment(mpi, Command(()))["PATH"]}
    done = subprocess.run(["bash", "-c", str(start)], env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert [line["argv"] for line in told(done.stdout)] == [["-m", "hvdtrain", *AWKWARD]], done.stderr


def test_one_host_needs_no_ssh(mpi: Mpi, tmp_path: Path) -> None:
    """Also for more ranks than cores."""
    ranks = len(os.sched_getaffinity(0)) + 1
    start = TARGETS[mpi.flavour].render(replace(spec(mpi, tmp_path, ranks), remote_shell=False))
    assert isinstance(start, Command)
    variables = {**environment(mpi, start), "PATH": str(Path(mpi.mpirun).parent)}
    done = subprocess.run(start.argv, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert len(told(done.stdout)) == ranks, done.stderr


WAITING = """\
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(100_000)
"""


def test_a_notice_reaches_the_ranks(mpi: Mpi, tmp_path: Path) -> None:
    """SIGUSR1 to the launcher is SIGUSR1 to the ranks: scripts for schedulers count on it."""
    python = shutil.which("python3", path=ENVIRONMENT["PATH"])
    assert python is not None
    (tmp_path / "hvdtrain.py").write_text(WAITING)
    job = replace(spec(mpi, tmp_path, 2), python=python, arguments=())
    start = TARGETS[mpi.flavour].render(job)
    assert isinstance(start, Command)
    given, pipe = environment(mpi, start), subprocess.PIPE
    with subprocess.Popen(start.argv, cwd=tmp_path, env=given, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        seen = "".join(process.stdout.readline() for _ in range(2))
        assert seen.count("ready") == 2
        process.send_signal(signal.SIGUSR1)
        process.wait(timeout=TIMEOUT_S)
    assert process.returncode == 7


def test_ranks_start_in_containers(mpi: Mpi, tmp_path: Path) -> None:
    """By a stand-in of Apptainer: its words pass through the launcher as they are."""
    image, show = make_image(tmp_path), "import json, sys; sys.stdout.write(json.dumps(sys.argv[1:]) + '\\n')"
    words = ("python", "-c", show, *AWKWARD)
    box = Container(str(image), str(make_runtime(tmp_path) / "apptainer"), ("/data:/data:ro",), gpus=True)
    job = replace(spec(mpi, tmp_path, 2), arguments=words, is_program=True, container=box)
    start = TARGETS[mpi.flavour].render(job)
    assert isinstance(start, Command)
    variables = {**environment(mpi, start), "PYTHONPATH": "/of-host"}
    done = subprocess.run(start.argv, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [list(AWKWARD)] * 2, done.stderr
    assert [(flags, options["--bind"]) for flags, options, _ in starts(image)] == [
        (["--nv"], [f"{tmp_path}:{tmp_path}", "/data:/data:ro"])
    ] * 2
    assert "/of-host" not in (image / "environment").read_text()
