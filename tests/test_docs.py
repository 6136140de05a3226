"""docs/outputs.md: its example of a sink against a real web server, its keys against a real journal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.config.parse import make_parser
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.task.base import NAMED, load_task_function
from tests.support.launch import train
from tests.support.reference import page as reference
from tests.support.thread_job import train_on_threads
from tests.support.toy import toy
from tests.support.web_server import posts

ROOT = Path(__file__).parents[1]
PROFILING = (ROOT / "docs" / "profiling.md").read_text()
TEXT = (ROOT / "docs" / "outputs.md").read_text()
TOY = ROOT / "tests" / "support" / "toy.py"


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    with posts(lambda request, body: json.loads(body)) as found:
        yield found


def test_the_web_tracker(
    tmp_path: Path, server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, taken = server
    code = re.findall(r"```python\n(# tracker\.py.*?)```", TEXT, re.DOTALL)[0]
    (tmp_path / "tracker.py").write_text(code)
    options = [f"--task={TOY}:toy", "--train.steps=47", "--observe.sinks", '["tracker.py:Tracker"]']
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKER_URL", url)
    train_on_threads(*options, size=2)
    assert taken[0]["config"]["train"]["steps"] == 47 and taken[0]["ranks"] == 2
    steps = [line for part in taken[1:] for line in part["steps"]]
    journal = read_steps(next((tmp_path / "runs").iterdir()) / "journal.jsonl")
    assert [line["step"] for line in steps] == list(range(1, 48))
    assert [line["loss"] for line in steps] == [line["loss"] for line in journal.values()]


def test_every_key_of_a_step_is_explained(tmp_path: Path) -> None:
    hvdtrain.train({"train": {"steps": 2, "reproducible": "bits"}, "run_dir": str(tmp_path)}, toy)
    keys = set().union(*read_steps(tmp_path / "journal.jsonl").values())
    table = TEXT.partition("## The journal")[2].partition("A line with")[0]
    assert keys == set(
        re.findall(r"`([a-z_]+)`", " ".join(row.split("|")[1] for row in re.findall(r"^\|.*", table, re.M)))
    )


def test_the_options_of_training_that_pages_show_exist() -> None:
    parsers = [make_parser(load_task_function(name)) for name in NAMED]
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        assert set(re.findall(r"--[a-z_]+\.[a-z_0-9]+(?:\.[a-z_]+)*", page.read_text())) <= known, page


def test_the_reference_is_current() -> None:
    assert (ROOT / "docs" / "reference.md").read_text() == reference(), "make reference"


@pytest.mark.slow
def test_the_program_of_the_profiling_session_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(# pages\.py.*?)```", PROFILING, re.DOTALL)
    (tmp_path / "pages.py").write_text(code)
    done = train("--task=pages.py:build", "--width=24", "--layers=1", "--train.steps=2", "--run_dir=run", cwd=tmp_path)
    assert "finished at step 2 of 2" in done.stdout
    assert (tmp_path / "run/timeline/report.html").exists()


@pytest.mark.parametrize("page", ["README.md", "docs/profiling.md", "docs/outputs.md", "docs/whatif.md"])
def test_the_timeline_commands_it_shows_take_these_options(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"hvdtrain timeline (\w+)([^\n#;`]*)", (ROOT / page).read_text())
    assert shown
    for command, rest in shown:
        with pytest.raises(SystemExit):
            main(["timeline", command, "--help"])
        assert set(re.findall(r"--[a-z_]+", rest)) <= set(re.findall(r"--[a-z_]+", capsys.readouterr().out)), command
