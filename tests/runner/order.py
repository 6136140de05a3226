"""The order of worth of slow tests: which ones to run first where there may not be time for all.

1. Tests of rooms that have changed since the tests last passed, new tests among them.
2. One test of each slow file, and of each law: the shortest.
3. The others, those first that have not passed for the longest time.

Within each, the longest first, so that no long test is left for the end. Tests of hosts and schedulers precede all
others: one process runs them one after the other, while the others go on.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

OF_HOSTS = ("tests/hosts/", "tests/slurm/")
"""Folders with tests that need other hosts, or a scheduler: all run in one process, so that there is one of each."""

_LAWS = "tests/laws/"
_TRAINING = frozenset(
    {
        *("comm", "compression", "config", "data", "engine", "exchange"),
        *("observe", "runtime", "spans.py", "state", "task", "training"),
    }
)
"""What a job that trains runs through."""
_STARTS = dict.fromkeys(("gallery", "train", "training", "train_on_threads"), _TRAINING)
"""Helpers that start jobs, and the rooms of these."""
_COMMANDS = {
    "build-horovod": "install",
    "bundle": "install",
    "preflight": "doctor",
    **{name: name for name in ("compare", "doctor", "export", "fit", "launch", "timeline", "verify")},
}
"""Words of command lines, and the room of each."""


@dataclass(frozen=True)
class Passed:
    """When a slow test last passed.

    Attributes:
        seconds: that it took.
        commit: at which.
    """

    seconds: float
    commit: str


def rooms_of(text: str) -> frozenset[str]:
    """Return the rooms of ``hvdtrain/`` that a file of tests is about: it imports them, or starts their commands."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hvdtrain."):
            rooms.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {name.name.split(".")[1] for name in node.names if name.name.startswith("hvdtrain.")}
        elif isinstance(node, ast.Name | ast.arg):
            rooms |= _STARTS.get(node.id if isinstance(node, ast.Name) else node.arg, frozenset())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            rooms |= {_COMMANDS[word] for word in node.value.split()[:8] if word in _COMMANDS}
    return frozenset(rooms)


def by_worth(
    passed: Mapping[str, Passed], changed: Mapping[str, Collection[str]], rooms: Mapping[str, frozenset[str]]
) -> list[str]:
    """Return the ids of tests in their order.

    Args:
        passed: of each test, when it last passed.
        changed: of each commit in `passed`, from the newest to the oldest: what has changed since, as rooms of
            ``hvdtrain/`` and as files of tests.
        rooms: of each file of tests, the rooms that it is about.
    """
    age = {commit: number for number, commit in enumerate(changed)}
    samples: dict[str, str] = {}
    for name in sorted(passed, key=lambda name: (passed[name].seconds, name)):
        samples.setdefault(_family(name), name)

    def key(name: str) -> tuple[bool, int, int, float, str]:
        file, test = name.partition("::")[0], passed[name]
        since = set(changed[test.commit])
        level = (
            0 if file in since or rooms.get(file, frozenset()) & since else 1 if samples[_family(name)] == name else 2
        )
        older = -age[test.commit] if level == 2 else 0
        return not name.startswith(OF_HOSTS), level, older, -test.seconds, name

    return sorted(passed, key=key)


def _family(name: str) -> str:
    """Return what a test is a sample of: its file; of a law, its function."""
    return name.partition("[")[0] if name.startswith(_LAWS) else name.partition("::")[0]


def rooms_of_files(root: Path, names: Collection[str]) -> dict[str, frozenset[str]]:
    """Return `rooms_of` of each file of the tests `names` that is there."""
    files = {name.partition("::")[0] for name in names}
    return {file: rooms_of((root / file).read_text()) for file in sorted(files) if (root / file).is_file()}
