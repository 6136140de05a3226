"""An error in the user's code is reported as such, with the traceback from the user's first line on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.parser import end
from hvdtrain.errors import (
    CheckpointError,
    DataError,
    DriftError,
    HorovodError,
    HvdtrainError,
    LaunchError,
    NonFiniteError,
    RunDirectoryError,
    TaskError,
    TransientDataError,
    UnreachableError,
    UnusableRunDirectoryError,
    UnwrittenCheckpointError,
)
from hvdtrain.loading import load
from hvdtrain.observe.output import FailureOutput


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("import json\n\n\ndef build():\n    return json.loads('{')\n", "JSONDecodeError in build, FILE:5, see above"),
        ("import nothing_like_this\n", "ModuleNotFoundError in <module>, FILE:1, see above"),
        ("def build(:\n", "FILE cannot be imported, see above"),
    ],
    ids=["raised", "import", "syntax"],
)
def test_an_error_of_the_users(source: str, last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "the_users.py"
    file.write_text(source)
    said = _told(f"{file}:build", capsys).splitlines()
    assert said[-1] == "hvdtrain: " + last.replace("FILE", str(file))
    assert not any("loading.py" in line for line in said)


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        (2, [CheckpointError, DataError, HorovodError, LaunchError, NonFiniteError, UnusableRunDirectoryError]),
        (2, [ImportError, SyntaxError]),
        (1, [TransientDataError, UnreachableError, UnwrittenCheckpointError, RunDirectoryError, DriftError]),
        (1, [HvdtrainError, OSError, RuntimeError]),
        (130, [KeyboardInterrupt]),
    ],
    ids=["ours", "imports", "passing", "others", "interrupt"],
)
def test_an_error_that_would_recur_has_its_own_exit_code(code: int, kinds: list[type[BaseException]]) -> None:
    assert {kind.__name__: end(kind("x"), None, FailureOutput()) for kind in kinds} == {
        kind.__name__: code for kind in kinds
    }


def test_an_error_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert _told(1, capsys).endswith("hvdtrain: unexpected error, see above\n")


def _told(spec: Any, capsys: pytest.CaptureFixture[str]) -> str:
    try:
        load(spec, TaskError, "")()
    except Exception as error:
        trace = error.__traceback__
        assert trace is not None
        end(error.with_traceback(trace.tb_next), None, FailureOutput())  # not in a file of hvdtrain
    return capsys.readouterr().err
