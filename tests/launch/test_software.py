"""Software that is active here is activated again in a clean shell: real environment modules, venv, stand-ins."""

from __future__ import annotations

import shlex
import subprocess
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.launch.variables import setup_lines
from tests.support.host import UnavailableError, required

MODULES = Path("/usr/share/modules/init/bash")
ODD = 'it\'s a "$HOME"\nand `more`'
"""A name that no shell takes as it is."""


def _run(script: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A script as a batch system starts it: no login shell, next to nothing in the environment."""
    clean = {"PATH": "/usr/bin:/bin", **(environ or {})}
    return subprocess.run(["/bin/bash", "--norc", "-c", script], capture_output=True, text=True, env=clean)


def _script(environ: Mapping[str, str]) -> str:
    return "".join(f"{line}\n" for line in setup_lines(environ))


def _variables(script: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    done = _run(f"{script}\nexec env -0", environ)
    assert done.returncode == 0, done.stderr
    return dict(entry.split("=", 1) for entry in done.stdout.split("\0")[:-1])


def test_no_software_to_activate() -> None:
    assert setup_lines({"PATH": "/usr/bin", "MODULESHOME": "/m", "LOADEDMODULES": "", "CONDA_EXE": "/c/conda"}) == []


def test_real_modules_are_loaded_again(tmp_path: Path) -> None:
    with required():
        if not MODULES.exists():
            raise UnavailableError("there are no environment modules: sudo apt-get install environment-modules")
    torch = 'setenv TORCH "on $::env(MPI)"'
    for name, body in (("my mpi's/4.1", "setenv MPI 4"), ("torch/2", torch), ("other/1", "setenv OTHER 1")):
        file = tmp_path / "files" / name
        file.parent.mkdir(parents=True)
        file.write_text(f"#%Module1.0\n{body}\n")
    set_up = f". {MODULES}; module use {shlex.quote(str(tmp_path / 'files'))}"
    before = _variables(f'{set_up}; module load "my mpi\'s/4.1" torch/2')
    assert before["TORCH"] == "on 4"
    script = _script(before)
    kept = ("MPI", "TORCH", "LOADEDMODULES", "MODULEPATH")
    passed_on = {name: value for name, value in before.items() if name != "PATH" and not name.startswith("BASH_FUNC_")}
    for start in ({}, passed_on):  # as schedulers do by default: PBS the one, Slurm the other
        after = _variables(script, start)
        assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    with_other = _variables(f"{set_up}; module load other/1\n{script}")
    assert "OTHER" not in with_other and with_other["TORCH"] == "on 4"
    (tmp_path / "files" / "torch" / "2").unlink()
    failed = _run(f"{script}\necho went on")
    assert failed.returncode != 0 and "went on" not in failed.stdout and "torch/2" in failed.stderr


def _stand_in(file: Path, command: str) -> None:
    """A file that defines a shell function which tells what it was called with."""
    file.parent.mkdir(parents=True)
    file.write_text(f"{command}() {{ printf '%s\\037' {command} \"$@\"; }}\n")


def _called(script: str) -> list[str]:
    done = _run(script)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\037")[:-1]


def test_names_survive_whatever_is_in_them(tmp_path: Path) -> None:
    root = tmp_path / ODD
    _stand_in(root / "init" / "bash", "module")
    _stand_in(root / "etc" / "profile.d" / "conda.sh", "conda")
    _stand_in(root / "share" / "spack" / "setup-env.sh", "spack")
    name = str(root)
    modules = _script({"LOADEDMODULES": f"a/1:{ODD}", "MODULESHOME": name, "MODULEPATH": ODD})
    assert _called(modules) == ["module", "purge", "module", "load", "a/1", ODD]
    conda = _script({"CONDA_PREFIX": name, "CONDA_EXE": f"{name}/bin/conda", "CONDA_DEFAULT_ENV": "x"})
    assert _called(conda) == ["conda", "activate", name]
    spack = _script({"SPACK_ENV": name, "SPACK_ROOT": name})
    assert _called(spack) == ["spack", "env", "activate", "--dir", name]
    packed = _variables(_script({"CONDA_PREFIX": name}))
    assert (packed["CONDA_PREFIX"], packed["PATH"]) == (name, f"{name}/bin:/usr/bin:/bin")


def test_a_real_virtual_environment_is_active_again(tmp_path: Path) -> None:
    folder = tmp_path / "my env"
    venv.create(folder, with_pip=False, symlinks=True)
    found = _run(f"{_script({'VIRTUAL_ENV': str(folder)})}python -c 'import sys; print(sys.prefix)'")
    assert found.stdout == f"{folder}\n", found.stderr


@pytest.mark.parametrize(
    "environ",
    [
        {"VIRTUAL_ENV": "/nowhere"},
        {"CONDA_PREFIX": "/nowhere", "CONDA_EXE": "/nowhere/bin/conda"},
        {"SPACK_ENV": "/nowhere", "SPACK_ROOT": "/nowhere"},
        {"LOADEDMODULES": "a", "MODULESHOME": "/nowhere"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_missing_software_ends_the_script(environ: dict[str, str]) -> None:
    done = _run(f"{_script(environ)}\necho went on")
    assert done.returncode != 0 and done.stdout == "" and "nowhere" in done.stderr


def test_dependent_software_is_activated_after_its_base() -> None:
    environ = {"VIRTUAL_ENV": "/v", "CONDA_PREFIX": "/c", "SPACK_ENV": "/s", "LOADEDMODULES": "m"}
    order = "\n".join(setup_lines(environ))
    places = [order.index(mark) for mark in ("load m", "--dir /s", "/c", "/v/bin")]
    assert places == sorted(places)


VARIABLES = ["LOADEDMODULES", "MODULESHOME", "MODULEPATH", "CONDA_PREFIX", "CONDA_EXE"]
VARIABLES += ["SPACK_ENV", "SPACK_ROOT", "VIRTUAL_ENV"]
SET_UPS = [dict.fromkeys(VARIABLES, "x"), {"CONDA_PREFIX": "x"}]
REASONS = {line.partition("\n")[0] for environ in SET_UPS for line in setup_lines(environ)}
"""All that there are."""


TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)


@given(st.dictionaries(st.sampled_from(VARIABLES), TEXT))
def test_a_reason_is_one_line_and_holds_no_name(environ: dict[str, str]) -> None:
    for line in setup_lines(environ):
        reason, _, command = line.partition("\n")
        assert reason in REASONS and command
