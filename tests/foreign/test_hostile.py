"""What a user gives to the real command by mistake or malice ends soon, with the error that is named here."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support import hostile
from tests.support.gallery import Gallery
from tests.support.launch import run

pytestmark = pytest.mark.slow

ROWS: list[tuple[str, int, str, str]] = [
    ("nonsense", 2, "", "nonsense"),
    ("--train.steps 0", 2, "ConfigError", "--train.steps"),
    ("--train.steps", 2, "ConfigError", "options"),
    ("--train '{a: {b: c}}'", 2, "ConfigError", "options"),
    ("--seed -1", 2, "ConfigError", "--seed"),
    ("--parallel.compression topk:5", 2, "ConfigError", "topk:5"),
    ("--run_dir empty.txt/x", 2, "UnusableRunDirectoryError", "empty.txt/x"),
    ("--config folder", 2, "ConfigError", "folder"),
    ("--config fifo", 2, "ConfigError", "fifo"),
    ("--config binary", 2, "ConfigError", "binary"),
    ("--config many.yaml", 2, "ConfigError", "--train.steps"),
    ("--config date.yaml", 2, "ConfigError", "date.yaml"),
    ("--config two.yaml", 2, "ConfigError", "two.yaml"),
    ("--config number.yaml", 2, "TaskError", "'5'"),
    ("--config", 2, "ConfigError", "'.'"),
    ("--task ''", 2, "TaskError", "''"),
    ("--task ..:x", 2, "TaskError", "..:x"),
    ("--task syntax.py:x", 2, "", "syntax.py"),
    ("--task importing.py:x", 2, "ModuleNotFoundError", "importing.py:1"),
    ("--task dividing.py:x", 1, "ZeroDivisionError", "dividing.py:1"),
    ("--task exiting.py:x", 2, "TaskError", "exiting.py"),
    ("--task os.path:join", 2, "TaskError", "task function"),
    ("--task tasks.py:build --hidden many", 2, "ConfigError", "--hidden"),
    ("--task tasks.py:nothing", 2, "TaskError", "task function"),
    ("--task tasks.py:raising", 1, "RuntimeError", "tasks.py:29"),
    ("--task tasks.py:exiting", 2, "TaskError", "task's code"),
    ("--task tasks.py:no_data", 2, "DataError", "empty"),
    ("--task tasks.py:negative", 2, "DataError", "length"),
    ("--task tasks.py:countless", 2, "DataError", "length"),
    ("--task tasks.py:a_number", 2, "DataError", "indexed"),
    ("--task tasks.py:no_pairs", 2, "TaskError", "loss function"),
    ("--task tasks.py:no_weight", 2, "TaskError", "loss function"),
    ("--task tasks.py:not_finite", 2, "NonFiniteError", "10 steps"),
    ("--task tasks.py:unreadable", 1, "OSError", "picture"),
    ("--task tasks.py:unreadable --loader.workers 1", 1, "OSError", "worker"),
    ("--task tasks.py:ending", 2, "TaskError", "task's code"),
    ("--task tasks.py:empty_samples", 1, "TypeError", "batch"),
    ("--task tasks.py:build --observe.sinks '[\"nowhere.py:x\"]'", 2, "ConfigError", "nowhere.py"),
    ("--task tasks.py:build --resume nowhere", 2, "ConfigError", "--resume"),
    ("--task tasks.py:build --resume folder", 2, "ConfigError", "--resume"),
    ("--task tasks.py:build --resume cut", 2, "CheckpointError", "cut"),
    ("--task tasks.py:build --resume no-manifest", 2, "ConfigError", "--resume"),
    ("--task tasks.py:build --resume no-tensors", 2, "CheckpointError", "no-tensors"),
    ("--data.text fifo", 2, "DataError", "fifo"),
    ("--data.tokens fifo.npy", 2, "DataError", "fifo.npy"),
    ("--data.tokens binary.npy", 2, "DataError", "binary.npy"),
    ("--data.tokens none.npy", 2, "DataError", "none.npy"),
    ("--data.tokens negative.npy", 2, "DataError", "negative.npy"),
    ("--data.tokens large.npy", 2, "DataError", "token ids"),
    ("--data.tokens folder", 2, "DataError", "folder"),
    ("--data.tokenizer fifo", 2, "DataError", "fifo"),
    ("--data.tokenizer deep.json", 2, "DataError", "deep.json"),
    ("--model.config fifo", 2, "ConfigError", "fifo"),
    ("--model.config deep.json", 2, "ConfigError", "deep.json"),
    ("--model.from folder", 2, "ConfigError", "folder"),
    ("timeline nonsense", 2, "", "nonsense"),
    ("timeline report fifo", 1, "TraceError", "fifo"),
    ("timeline report deep.json", 1, "TraceError", "deep.json"),
    ("timeline report odd.json", 1, "TraceError", "odd.json"),
    ("timeline report start", 1, "TraceError", "start"),
    ("timeline report bytes", 1, "TraceError", "bytes"),
    ("timeline report good.json --log fifo", 1, "TraceError", "fifo"),
    ("timeline report good.json --html folder", 1, "TraceError", "folder"),
    ("timeline report good.json --fail_if \"__import__('os')\"", 2, "ConfigError", "--fail_if"),
    ("compare good.json fifo", 1, "TraceError", "good.json"),
    ("compare run fifos", 1, "TraceError", "fifos"),
    ("compare run run --fail_if 'loss > eval(base)'", 2, "ConfigError", "--fail_if"),
    ("timeline merge fifo -o out.json", 1, "TraceError", "fifo"),
    ("timeline merge bytes -o out.json", 1, "TraceError", "bytes"),
    ("timeline whatif fifos", 1, "DataError", "fifos"),
    ("timeline whatif run --size 0", 1, "ConfigError", "--size"),
    ("timeline whatif run --compression nonsense", 1, "ConfigError", "nonsense"),
    ("verify nonsense", 2, "", "nonsense"),
    ("verify data bytes", 1, "RunDirectoryError", "bytes"),
    ("verify resume deep", 1, "RunDirectoryError", "deep"),
    ("verify resume fifos", 1, "RunDirectoryError", "fifos"),
    ("verify resume run --steps 0", 2, "", "--steps"),
    ("launch -np 0", 2, "", "-np"),
    ("launch -np 2 -H a:x", 2, "", "a:x"),
    ("build-horovod --gpu nonsense", 2, "", "--gpu"),
    ("bundle", 2, "", "FOLDER"),
]
"""Arguments of the command, its exit code, the class of the error if it is reported, what the message names."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, gallery: Gallery) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    hostile.make(folder, gallery["one"].run)
    return folder


@pytest.mark.parametrize(("arguments", "code", "error", "key"), ROWS, ids=[row[0] for row in ROWS])
def test_it_ends_as_it_should(arguments: str, code: int, error: str, key: str, files: Path) -> None:
    words = ["-m", "hvdtrain", *shlex.split(arguments)]
    done = run(words, cwd=files, environment={"PYTHONWARNINGS": "ignore"}, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "unexpected error" not in said
    assert "Traceback" not in said or "see above" in said or "the run failed" in said
    message = _message(done)
    assert error in message and key in message, said
    assert not (files / "pasted").exists()


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says what is wrong, of a failure card with the error's class."""
    if card := re.search(r"^rank 0 on .* failed: (\w+).*\n  (.*(?:\n    .*)*)", done.stderr, re.MULTILINE):
        return f"{card[1]}: {' '.join(card[2].split())}"
    told = re.search(r"^(?:hvdtrain|error).*(?:[Ee]rror|there is|cannot be).*", done.stderr + done.stdout, re.MULTILINE)
    return told[0] if told else ""
