"""Running a plan: cached parts are not built again, a failure leaves nothing partial, two builds run in sequence."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvdtrain.errors import BuildError
from hvdtrain.install import build as module
from hvdtrain.install import record
from hvdtrain.install.build import build, pending
from hvdtrain.install.build_plan import BuildPlan, plan
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.steps import Step, explain_failure
from tests.install.probe_examples import MPI, PYTHON, example_probe
from tests.support.launch import TIMEOUT_S


def python_step(name: str, program: str) -> Step:
    return Step(name, f"doing {name}", "1 s", (sys.executable, "-I", "-S", "-c", program), 60)


RIGHT = json.dumps({"size": 2, "mpi": True, "total": [3.0, 30.0, 300.0]})


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildPlan:
    """A plan whose commands do at once what the real ones do."""
    monkeypatch.setattr(module, "installed", lambda: None)
    monkeypatch.setattr(module, "SDIST_SHA256", hashlib.sha256(b"source").hexdigest())
    (tmp_path / "env" / "site").mkdir(parents=True)
    python = dataclasses.replace(PYTHON, prefix=tmp_path / "env", site=tmp_path / "env" / "site")
    real = plan(example_probe(cache=tmp_path / "cache", python=python))
    count = "open('../count', 'a').write('x');"
    programs = {
        "sdist": f"open('sdist/{real.sdist.name}', 'wb').write(b'source')",
        "compile": f"{count} print('[ 50%] Building'); open('wheel/{real.wheel.name}', 'w').write('wheel')",
        "install": f"assert open({str(real.wheel)!r}).read() == 'wheel'",
        "proof": f"print('hvdtrain-proof ' + {RIGHT!r})",
    }
    return dataclasses.replace(real, steps=tuple(python_step(*step) for step in programs.items()))


def replaced(planned: BuildPlan, name: str, program: str) -> BuildPlan:
    steps = tuple(python_step(name, program) if step.name == name else step for step in planned.steps)
    return dataclasses.replace(planned, steps=steps)


def names(planned: BuildPlan) -> list[str]:
    return [step.name for step in pending(planned)]


def run(planned: BuildPlan, environ: Mapping[str, str] | None = None, *, prove: bool = True) -> None:
    build(planned, environ or {}, lambda line: None, prove=prove)


def refused(planned: BuildPlan, *words: str) -> None:
    with pytest.raises(BuildError) as caught:
        run(planned)
    for word in words:
        assert word in str(caught.value)


def test_the_second_time_only_installs_and_proves(planned: BuildPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    progress: list[str] = []
    assert names(planned) == ["sdist", "compile", "install", "proof"]
    (planned.scratch / "wheel").mkdir(parents=True)
    (planned.scratch / "wheel" / "half.whl").write_text("a killed build left it")
    build(planned, {}, said.append, progress.append)
    assert [path.name for path in planned.wheel.parent.iterdir()] == [planned.wheel.name]
    assert planned.wheel.read_text() == "wheel"
    assert not planned.scratch.exists()
    assert progress == ["doing compile: 50%"]
    assert "doing compile (about 1 s)" in said
    assert names(planned) == ["install", "proof"]
    source = f"file://{planned.wheel}".replace("+", "%2B")
    record = BuildRecord(planned.version, source=source)
    monkeypatch.setattr(module, "installed", lambda: record)
    assert names(planned) == ["proof"]
    # The same version from another key, for instance of an MPI in another place: installed again.
    elsewhere = dataclasses.replace(record, source=source.replace(planned.key, "other"))
    monkeypatch.setattr(module, "installed", lambda: elsewhere)
    assert names(planned) == ["install", "proof"]


def test_a_horovod_is_untested_until_its_ranks_have_summed(planned: BuildPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the test fails, or is killed."""

    mark = planned.site / record.MARK

    def untested() -> bool:
        return mark.exists() and mark.read_text() == f"{planned.version}\n"

    refused(replaced(planned, "proof", ""))
    assert untested()
    run(planned)
    assert not untested()
    run(replaced(planned, "proof", "raise SystemExit('started')"), prove=False)
    assert untested()
    elsewhere = dataclasses.replace(planned, provable=False)
    assert names(elsewhere) == ["install"]
    # The test runs without what a build needs.
    monkeypatch.setattr(module, "installed", lambda: BuildRecord(planned.version))
    monkeypatch.setattr(module, "proof_step", lambda probe, mpi: planned.steps[-1])
    python = dataclasses.replace(PYTHON, site=planned.site)
    module.prove(example_probe(python=python, compiler=None, make=None), {}, lambda line: None)
    assert not untested()


def test_srun_tests_only_inside_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = dataclasses.replace(MPI, mpirun=None)
    assert not plan(example_probe(mpi=mpi)).provable
    inside = plan(example_probe(mpi=mpi, environ={"SLURM_JOB_ID": "7"}))
    assert inside.provable and inside.steps[-1].argv[0] == "srun" and "-n2" in inside.steps[-1].argv
    monkeypatch.setattr(module, "installed", lambda: BuildRecord("0.28.1"))
    with pytest.raises(BuildError, match="salloc -n2"):
        module.prove(example_probe(mpi=mpi), {}, lambda line: None)


@pytest.mark.parametrize("spoiled", ["wheel", "folder", "owner"])
def test_a_wheel_that_others_could_write_is_not_installed(
    planned: BuildPlan, spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(planned)
    if spoiled == "owner":
        owner = planned.wheel.stat().st_uid
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
        if owner == 0:  # root's wheels are trusted
            os.chown(planned.wheel, 12345, -1)
    else:
        (planned.wheel if spoiled == "wheel" else planned.wheel.parent).chmod(0o777)
    refused(planned, "another user's", "XDG_CACHE_HOME")


def test_without_locks_a_second_build_is_refused(planned: BuildPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    planned.scratch.mkdir(parents=True)
    refused(planned, "may be running", f"rm -r {planned.scratch}")
    assert planned.scratch.exists(), "it belongs to the other build"
    planned.scratch.rmdir()
    run(planned)
    assert planned.wheel.exists()


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC, errno.EACCES])
def test_a_cache_that_takes_no_files_is_named(planned: BuildPlan, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(step: Step, *rest: object) -> str:
        raise OSError(number, os.strerror(number), str(planned.scratch / "cxx"))

    monkeypatch.setattr(module, "run", fail)
    refused(planned, str(planned.scratch), os.strerror(number), "0.5 GiB", "XDG_CACHE_HOME")


def test_a_fetched_toolkit_gets_the_names_that_cmake_and_nvcc_look_for(planned: BuildPlan) -> None:
    home = "cuda/nvidia/cu13"
    fetch = python_step("toolkit", f"import os; os.makedirs('{home}/lib'); open('{home}/lib/libcudart.so.13', 'w')")
    check = f"open('{home}/lib/libcudart.so'); open('{home}/lib64/libcudart.so'); "
    check += f"open('wheel/{planned.wheel.name}', 'w').write('wheel')"
    fetching = dataclasses.replace(planned, steps=(fetch, *replaced(planned, "compile", check).steps))
    run(fetching)
    assert names(fetching) == ["install", "proof"], "a finished wheel needs no nvcc"
    other = dataclasses.replace(planned, key="other", wheel=planned.cache / "other" / planned.wheel.name)
    assert names(other) == ["compile", "install", "proof"], "another torch needs no second fetch"


FAILS = "print('a.cc:1: fatal error: No space left on device'); raise SystemExit(2)"
WRONG = [RIGHT, *(f"hvdtrain-proof {RIGHT.replace(*wrong)}" for wrong in (("30.0", "31.0"), ("true", "false")))]


@pytest.mark.parametrize(
    ("step", "program", "words"),
    [
        ("sdist", "open('sdist/horovod-0.28.1.tar.gz', 'wb').write(b'forged')", ["checksum"]),
        ("compile", FAILS, ["doing compile", "exit code 2", "fatal error", "free some disk space", "log"]),
        *(("proof", f"print({printed!r})", ["wrong sum"]) for printed in ["", *WRONG]),
    ],
)
def test_a_step_that_fails_shows_why_and_leaves_nothing(
    step: str, program: str, words: list[str], planned: BuildPlan
) -> None:
    record.check_proof(f"noise\n[1,0]<stdout>:hvdtrain-proof {RIGHT}\nmore")
    refused(replaced(planned, step, program), *words)
    assert (planned.sdist.exists(), planned.wheel.exists()) == (step != "sdist", step == "proof")
    assert not planned.scratch.exists()
    assert step != "compile" or "fatal error" in planned.log.read_text()


def test_settings_of_other_builds_are_not_passed_on(planned: BuildPlan) -> None:
    program = "import os; assert 'HOROVOD_WITHOUT_MPI' not in os.environ; "
    program += "assert os.environ['MAKEFLAGS'] == '-j2' and 'MAKELEVEL' not in os.environ; "
    program += f"open('wheel/{planned.wheel.name}', 'w').write('wheel')"
    # With HOROVOD_LOCAL_VERSION set, pip finds that the source is not of the version it asked for, and drops it.
    fetch = "import os; assert 'HOROVOD_LOCAL_VERSION' not in os.environ; "
    fetch += f"open('sdist/{planned.sdist.name}', 'wb').write(b'source')"
    outer = {"HOROVOD_WITHOUT_MPI": "1", "MAKEFLAGS": "-j --jobserver-auth=3,4", "MAKELEVEL": "1"}
    run(replaced(replaced(planned, "compile", program), "sdist", fetch), outer)


def test_two_builds_take_turns_and_compile_once(planned: BuildPlan) -> None:
    planned.cache.mkdir(parents=True)
    waiting = threading.Event()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    with (planned.cache / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=build, args=(planned, {}, say))
        second.start()
        assert waiting.wait(TIMEOUT_S)
        assert "waiting for another build" in said[0]
        second.join(0.2)
        assert second.is_alive(), "it went on without the lock"
        assert not planned.log.exists()
    second.join()
    run(planned)
    assert (planned.cache / "count").read_text() == "x"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("ERROR: No matching distribution found for horovod==0.28.1", "index-url"),
        ("ERROR: No matching distribution found for cuda-toolkit[nvcc]==13.0.*", "module load cuda"),
        ("OSError: [Errno 122] Disk quota exceeded", "XDG_CACHE_HOME"),
        ("Temporary failure in name resolution", "network"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "memory"),
    ],
)
def test_a_known_failure_names_what_mends_it(line: str, fix: str) -> None:
    error = explain_failure(python_step("compile", ""), 1, ["WARNING: " + line, *["ERROR: then"] * 20], "key.log")
    assert fix in str(error.next_step)
    assert line in str(error) and "key.log" in str(error), "shown, whatever else was printed"


def test_the_first_errors_are_shown_and_not_what_pip_says_about_them() -> None:
    lines = ["-- Check for errors", "CMake Error at CMakeLists.txt:1", *[f"a.cc:{n}: error: e{n}" for n in range(50)]]
    lines += ["error: subprocess-exited-with-error", "ERROR: Failed building wheel for horovod"]
    text = str(explain_failure(python_step("compile", ""), 1, lines, "log"))
    assert all(shown in text for shown in ("CMake Error at CMakeLists.txt:1", "a.cc:0: error: e0", "a.cc:49: error"))
    assert not any(hidden in text for hidden in ("e20", "wheel for horovod", "-- Check"))
