"""docs/doctor.md lists every check, under the name by which its finding is shown."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.doctor.checks import CHECKS
from hvdtrain.doctor.report import Finding

TEXT = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)`( \*)? \|", TEXT, re.M))


def findings(check: Callable[[Any], Finding | None]) -> list[ast.Call]:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(check))) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "Finding"]


def name(check: Callable[[Any], Finding | None]) -> str:
    (found,) = {ast.literal_eval(call.args[0]) for call in findings(check)}
    return str(found)


def test_every_check_has_a_name_of_its_own_and_a_row_marked_if_it_may_be_only_named() -> None:
    names = [name(check) for check in CHECKS]
    assert sorted(ROWS) == sorted(names)
    minor = [any(k.arg == "minor" for call in findings(check) for k in call.keywords) for check in CHECKS]
    assert {name: bool(mark) for name, mark in ROWS.items()} == dict(zip(names, minor, strict=True))
