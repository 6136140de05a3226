"""The files of launchers/ are current, clean, and do what they say; docs/ names each target and valid commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdtrain.cli.launch_options import parse
from hvdtrain.launch.choose import AUTO, OWN
from hvdtrain.launch.hosts import parse_discovered
from hvdtrain.launch.targets import TARGETS
from tests.support.host import required_tool
from tests.support.launchers import files

FOLDER = Path(__file__).parents[2] / "launchers"
SCRIPTS = sorted(path.name for path in FOLDER.iterdir() if path.read_text().startswith("#!"))


def test_the_folder_has_the_rendered_files() -> None:
    for name, text in files().items():
        assert (FOLDER / name).read_text() == text, f"{name}: make launchers"


def test_only_scripts_are_executable() -> None:
    assert {path.name for path in FOLDER.iterdir() if os.access(path, os.X_OK)} == set(SCRIPTS) - {"slurm.sbatch"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_clean(name: str) -> None:
    done = subprocess.run([required_tool("shellcheck"), name], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


SPY = "#!/bin/sh\nexec {python} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"\n"
WORDS = ["--config", "run it's.yaml", "two\nlines"]


@pytest.fixture
def spied(tmp_path: Path) -> dict[str, str]:
    for name in ("mpirun", "hvdtrain"):
        (tmp_path / name).write_text(SPY.format(python=shutil.which("python3")))
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def _argv(name: str, variables: dict[str, str]) -> list[str]:
    done = subprocess.run([FOLDER / name, *WORDS], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_local(spied: dict[str, str]) -> None:
    assert _argv("local.sh", spied) == ["launch", "-np", "2", "--", *WORDS]
    assert _argv("local.sh", {**spied, "NP": "8"})[2] == "8"


def test_mpirun(spied: dict[str, str]) -> None:
    argv = _argv("mpirun.sh", {**spied, "NP": "8", "HOSTS": "a:4,b:4"})
    assert argv[:4] == ["-np", "8", "--host", "a:4,b:4"] and argv[-6:] == ["python", "-m", "hvdtrain", *WORDS]
    done = subprocess.run([FOLDER / "mpirun.sh"], env=spied, capture_output=True, text=True)
    assert done.returncode != 0 and "such as NP=8" in done.stderr


def test_the_discovery_script_prints_the_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a:4\nb:2\n")
    script = FOLDER / "elastic-discovery.sh"
    for variables in ({"PATH": "/usr/bin:/bin"}, {"PATH": "/usr/bin:/bin", "HVDTRAIN_HOSTS": str(tmp_path / "hosts")}):
        done = subprocess.run([script], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
        assert parse_discovered(done.stdout) == {"a": 4, "b": 2}


def _page(name: str) -> str:
    return (FOLDER.parent / "docs" / f"{name}.md").read_text()


def test_every_target_is_in_the_table() -> None:
    table = _page("launching").partition("| `--to`")[2].partition("##")[0]
    targets = " ".join(re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", targets)) == {AUTO, OWN, *TARGETS}


def test_the_examples_are_valid_commands() -> None:
    pages = _page("elastic") + _page("launching")
    lines = re.findall(r"^    (?:salloc .*)?hvdtrain launch (.*?)-- .*$", pages, re.MULTILINE)
    assert len(lines) > 10
    for line in lines:
        parse(line.split())
