"""The wheel and the source archive are whole, and a new environment without a clone trains with the three commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.launch import ROOT, TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


def _run(*argv: str | Path, environ: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(argv, env=environ, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` writes, from what git has."""
    out = tmp_path_factory.mktemp("dist")
    _run("git", "clone", "--quiet", "--local", "--no-hardlinks", ROOT, out / "clone")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, out / "clone")
    return out


def test_they_have_each_file_of_the_package_and_no_other(dist: Path) -> None:
    expected = set(_run("git", "-C", dist / "clone", "ls-files", "hvdtrain").split())
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if ".dist-info/" not in name} == expected
    with tarfile.open(archive) as tar:
        found = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    rest = {"README.md", "LICENSE", "setup.py", "setup.cfg", "MANIFEST.in", "PKG-INFO"}
    assert {name for name in found if ".egg-info" not in name} == expected | rest


def test_the_three_commands_in_a_new_environment(dist: Path, tmp_path: Path) -> None:
    """Dependencies are those of this environment: their download is not what is tested."""
    (wheel,) = dist.glob("*.whl")
    page = (ROOT / "docs" / "install.md").read_text()
    commands = re.findall(
        r"^(?:pip install|hvdtrain build-horovod|horovodrun) .*$|^hvdtrain build-horovod$", page, re.M
    )
    assert [command.split()[0] for command in commands[:3]] == ["pip", "hvdtrain", "horovodrun"]
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    place = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    _run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel)
    (place / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    binaries = tmp_path / "venv" / "bin"
    (binaries / "hvdtrain").write_text(
        f"#!{binaries}/python\nimport sys\nfrom hvdtrain.__main__ import main\nsys.exit(main())\n"
    )
    (binaries / "hvdtrain").chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{binaries}:{Path(sys.executable).parent}:{environ['PATH']}"  # horovodrun is this environment's
    environ |= {"PATH": path, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    where = "import hvdtrain; print(hvdtrain.__file__)"
    assert _run(binaries / "python", "-c", where, environ=environ, cwd=tmp_path).startswith(str(place))
    assert "Horovod" in _run(binaries / "hvdtrain", "build-horovod", "--dry-run", environ=environ, cwd=tmp_path)
    assert not (tmp_path / "hvdtrain").exists(), "a dry run leaves the cache alone"
    argv = commands[2].split()
    assert argv[-2:] == ["-m", "hvdtrain"]
    small = ["--model.preset=tiny", "--train.steps=4", "--train.eval_samples=8", "--run_dir=run"]
    out = _run(*argv, *small, environ=environ, cwd=tmp_path)
    assert "finished at step 4 of 4" in out and (tmp_path / "run" / "timeline" / "report.html").exists()
