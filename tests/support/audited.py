"""What the Python processes of a command did that a way in could be made of: unpickling, ports, shells."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.launch import ROOT

_HOOK = Path(__file__).with_name("audit")


def audited(file: Path) -> dict[str, str]:
    """The variables by which the Python processes of a command write into `file` what they do."""
    return {"AUDIT_FILE": str(file), "PYTHONPATH": os.pathsep.join([str(_HOOK), str(ROOT)])}


def seen(file: Path, event: str) -> list[dict[str, Any]]:
    """What was written of one kind of event."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["event"] == event]


def of_launcher(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of stock horovodrun itself, and of the processes that it forks."""
    return [line for line in lines if any("horovodrun" in word or "fork" in word for word in line["argv"])]
