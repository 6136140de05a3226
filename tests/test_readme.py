"""The commands and code of README.md and docs/training.md, run as written (for fewer steps, on the tiny model)."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from hvdtrain.__main__ import main
from hvdtrain.verify.data import to_text, verify_data
from tests.support.gallery import Gallery
from tests.support.launch import ENVIRONMENT, TIMEOUT_S, program, run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRAINING_PAGE = (ROOT / "docs" / "training.md").read_text()
BOTH = README + TRAINING_PAGE


def _blocks(language: str, page: str = BOTH) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


COMMANDS = [line.split("  #")[0].strip() for block in _blocks("sh") for line in block.splitlines()]
TRAINING = [c for c in COMMANDS if "-m hvdtrain" in c]
LAUNCHING = [c for c in COMMANDS if c.startswith("hvdtrain launch") and "--dry-run" not in c]
SHOWN = [c for c in COMMANDS if "--dry-run" in c]
SPIRAL, HOROVOD_SCRIPT = _blocks("python", README)
(FROM_PYTHON,) = (block for block in _blocks("python", TRAINING_PAGE) if "hvdtrain.train(" in block)
(CALLBACK,) = (block for block in _blocks("python", TRAINING_PAGE) if block.startswith("# mine.py"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("It is a page. " * 2000)
    (tmp_path / "spiral.py").write_text(SPIRAL)
    (tmp_path / "mine.py").write_text(CALLBACK)
    for name in ("run.yaml", "short.yaml"):
        (tmp_path / name).write_text("model: {preset: tiny}\n")
    return tmp_path


def _run(command: list[str], folder: Path, codes: Collection[int] = (0,)) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def test_the_commands_are_found() -> None:
    assert len(TRAINING) >= 9 and len(LAUNCHING) == 2 and len(SHOWN) == 3
    assert {"make train", "make test", "hvdtrain doctor", "hvdtrain doctor --json"} <= set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING)
def test_training_commands(command: str, folder: Path) -> None:
    words = shlex.split(command.partition(" > ")[0])
    program(words[0])
    if "spiral.py:build" in command or "--print_config" in command:
        fewer = ["--train.steps", "3"]
    else:
        fewer = ["--model.preset", "tiny", "--train.eval_samples", "4"]
        fewer += ["--train.epochs", "0.001"] if "--train.epochs" in command else ["--train.steps", "3"]
    out = _run([*words, *fewer], folder)
    assert ("finished at step" in out or "stopped as asked" in out) != ("--print_config" in command)


@pytest.mark.parametrize("command", LAUNCHING)
@pytest.mark.slow
def test_launching_commands(command: str, folder: Path) -> None:
    words = shlex.split(command)
    program(words[0])
    fewer = ["--model.preset", "tiny", "--train.eval_samples", "4", "--train.steps", "3"]
    assert "finished at step" in _run([*words, "--", *fewer], folder)


@pytest.mark.parametrize("command", SHOWN)
def test_commands_that_show_what_would_run(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(command.partition(" > ")[0])
    assert words[0] == "hvdtrain" and main(words[1:]) == 0
    assert "hvdtrain" in capsys.readouterr().out


def test_an_own_model_from_python(folder: Path) -> None:
    (folder / "own.py").write_text(FROM_PYTHON)
    out = run(["own.py"], cwd=folder).stdout
    assert float(out.splitlines()[-1].split()[0]) < 100
    assert len(list((folder / "runs").iterdir())) == 1


@pytest.mark.slow
def test_the_horovod_script(folder: Path) -> None:
    (folder / "script.py").write_text(HOROVOD_SCRIPT)
    (command,) = [c for c in COMMANDS if "script.py" in c]
    assert command.startswith("horovodrun ")
    assert float(re.findall(r"loss ([\d.]+)", _run([*shlex.split(command)], folder))[-1]) < 8, "it was 16 at first"


def test_a_job_prints_the_transcript_of_a_lost_rank(gallery: Gallery) -> None:
    """Ranks, steps and times differ from those of the README."""
    survived = gallery["survived"]
    proof = to_text(verify_data(survived.run), survived.run)
    printed = {_masked(line) for line in [*survived.out.splitlines(), *survived.err.splitlines(), *proof.splitlines()]}
    (shown,) = re.findall(r"```\n(hvdtrain launch: rank .*?)```", README, re.DOTALL)
    lines = [line for line in shown.splitlines() if not line.startswith("$ ")]
    assert len(lines) >= 6
    assert [line for line in lines if _masked(line) not in printed] == []


def _masked(line: str) -> str:
    return re.sub(r"[\d.,]+", "N", line)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE) if anchor and target.exists() else []
        anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
        if not target.exists() or (anchor and anchor not in anchors):
            dead.append(link)
    assert dead == []


def test_the_figures_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec and spec.loader
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    results = render.read(max((ROOT / "benchmarks" / "results").glob("*-cpu-2-cores.json")))
    for page, text in render.pages(results).items():
        assert render.BEGIN + text + render.END in page.read_text()
    drawn = re.findall(r">([\d.]+)</text>", render.PLOT.read_text())
    for _, between in render.CONTENDERS.values():
        assert f"{results[f'two_hosts/1gbit/{between}']['value']:.2f}" in drawn
