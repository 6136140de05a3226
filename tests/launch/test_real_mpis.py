"""The command lines of the MPI targets, run by the real launchers of Open MPI 4 and 5, MPICH and Intel MPI."""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.launch.spec import Command, Container, JobSpec, Mpi
from hvdtrain.launch.targets import TARGETS
from tests.support.containers import make_image, make_runtime, starts
from tests.support.echo_python import echo_python
from tests.support.journals import read_losses
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S, train
from tests.support.mpis import NAMES, any_of, wheel

pytestmark = pytest.mark.slow

AWKWARD = ("a b", "it's", 'say "x"', "two\nlines", "$HOME `id` $(id) \\", "--", "*", "ü", "")


@pytest.fixture(params=NAMES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return any_of(str(request.param))


def spec(mpi: Mpi, folder: Path, ranks: int) -> JobSpec:
    python = echo_python(folder)
    return JobSpec(AWKWARD, ranks, python=python, mpi=mpi, is_root=os.geteuid() == 0, folder=str(folder))


def environment(mpi: Mpi, **variables: str) -> dict[str, str]:
    folder = str(Path(mpi.mpirun).parent)
    return {**ENVIRONMENT, "PATH": f"{folder}:{ENVIRONMENT['PATH']}", **variables}


def rendered(job: JobSpec) -> Command:
    assert job.mpi is not None
    start = TARGETS[job.mpi.flavour].render(job)
    assert isinstance(start, Command)
    return start


def run(argv: Sequence[str], cwd: Path, variables: dict[str, str], timeout_s: float = TIMEOUT_S) -> str:
    done = subprocess.run(argv, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(output: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_get_their_arguments_and_environment(mpi: Mpi, ranks: int, tmp_path: Path) -> None:
    """More ranks than cores too, in a folder of an awkward name, and no rank is bound to a part of the cores.

    A shell takes the shown command.
    """
    folder = tmp_path / "it's\na folder"
    folder.mkdir()
    start = rendered(spec(mpi, folder, ranks))
    argv = start.argv if ranks > 1 else ["bash", "-c", str(start)]
    lines = told(run(argv, folder, environment(mpi, **(start.variables if ranks > 1 else {}))))
    assert [(line["rank"], line["size"], line["local_rank"]) for line in lines] == [(k, ranks, k) for k in range(ranks)]
    assert all(line["argv"] == ["-m", "hvdtrain", *AWKWARD] and line["cwd"] == str(folder) for line in lines)
    assert all(line["cores"] == len(os.sched_getaffinity(0)) for line in lines)


def test_one_host_needs_no_ssh(mpi: Mpi, tmp_path: Path) -> None:
    """Also for more ranks than cores."""
    ranks = len(os.sched_getaffinity(0)) + 1
    start = rendered(replace(spec(mpi, tmp_path, ranks), remote_shell=False))
    variables = {**environment(mpi, **start.variables), "PATH": str(Path(mpi.mpirun).parent)}
    assert len(told(run(start.argv, tmp_path, variables))) == ranks


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
    start = rendered(replace(spec(mpi, tmp_path, 2), python=python, arguments=()))
    given, pipe = environment(mpi, **start.variables), subprocess.PIPE
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
    start = rendered(replace(spec(mpi, tmp_path, 2), arguments=words, is_program=True, container=box))
    out = run(start.argv, tmp_path, environment(mpi, **{**start.variables, "PYTHONPATH": "/of-host"}))
    assert [json.loads(line) for line in out.splitlines()] == [list(AWKWARD)] * 2
    assert [(flags, options["--bind"]) for flags, options, _ in starts(image)] == [
        (["--nv"], [f"{tmp_path}:{tmp_path}", "/data:/data:ro"])
    ] * 2
    of_python = (image / "environment").read_text()
    assert of_python.count("PYTHONNOUSERSITE=1\n") == 2 and "/of-host" not in of_python


@pytest.fixture(scope="module")
def on_mpich() -> Mpi:
    """MPICH's environment, in which this one's packages are seen and Horovod is built for that MPI."""
    mpi = wheel("mpich")
    python = Path(mpi.mpirun).with_name("python")
    asked = [str(python), "-c", "import site; print(site.getsitepackages()[0])"]
    Path(run(asked, ROOT, ENVIRONMENT).strip(), "lend.pth").write_text("\n".join(site.getsitepackages()))
    # Without optimization it takes less time; so it is not kept where users have theirs.
    quick = {"HOROVOD_DEBUG": "1", "XDG_CACHE_HOME": str(ROOT / "build/quick")}
    variables = environment(mpi, PYTHONPATH=str(ROOT), **quick)
    run([str(python), "-m", "hvdtrain", "build-horovod"], ROOT, variables, 1200)
    return mpi


@pytest.mark.xdist_group("builds")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["mpich", "intelmpi"])
def test_horovod_built_on_mpich_trains(name: str, on_mpich: Mpi, tmp_path: Path) -> None:
    """Under MPICH's mpirun and, as they share a binary interface, under Intel's."""
    mpi = on_mpich if name == "mpich" else wheel(name)
    toy = (f"--task={ROOT}/tests/support/toy.py:toy", "--train.steps=6", "--run_dir=run")
    start = rendered(JobSpec(toy, 2, python=f"{on_mpich.prefix}/bin/python", mpi=mpi))
    given = environment(mpi, PYTHONPATH=str(ROOT), **start.variables)
    if name == "intelmpi":
        given["LD_LIBRARY_PATH"] = f"{mpi.prefix}/lib"
    run(start.argv, tmp_path, given)
    (tmp_path / "alone").mkdir()
    train(*toy, cwd=tmp_path / "alone")
    losses, alone = (read_losses(folder / "run") for folder in (tmp_path, tmp_path / "alone"))
    assert losses == pytest.approx(alone, rel=1e-6) and len(losses) == 6
