"""The committed record of how long tests take, and when each slow one last passed: ``times.json``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.runner.order import Passed
from tests.runner.results import PASSED, Outcome, in_words

FILE = Path(__file__).with_name("times.json")
LIMITS_MIN = {"make check": 1, "make test": 10, ".ci/run": 75}
"""What is meant, and for ``.ci/run`` the deadline."""


@dataclass
class Times:
    """What is recorded.

    Attributes:
        slow: by the id of each slow test.
        mutations: of each room, the commit at which tests caught all its mutations.
        tiers: of each command, the number of tests that passed, and its seconds.
        machine: on which that was measured.
    """

    slow: dict[str, Passed] = field(default_factory=dict)
    mutations: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    machine: str = ""

    def add(self, command: str, outcomes: Mapping[str, Outcome], seconds: float, commit: str) -> None:
        """Add a run of a command at a commit. Where it had slow tests, others are no longer there."""
        slow = {name: outcome for name, outcome in outcomes.items() if outcome.slow}
        if slow:
            self.slow = {name: passed for name, passed in self.slow.items() if name in slow}
        self.slow |= {n: Passed(round(o.seconds, 1), commit) for n, o in slow.items() if o.kind == PASSED}
        passed = sum(outcome.kind == PASSED for outcome in outcomes.values())
        self.tiers[command] = {"tests": passed, "seconds": round(seconds)}
        self.machine = _machine()

    def add_mutations(self, rows: Iterable[Mapping[str, Any]], number: Mapping[str, int], commit: str) -> None:
        """Add outcomes of mutations at a commit; `number`: how many each room has."""
        caught = Counter(str(row["room"]) for row in rows if row["caught"])
        self.mutations |= {room: commit for room, tried in caught.items() if tried == number[room]}

    def table(self) -> str:
        """Return the table of tiers in Markdown."""
        rows = ["| command | tests that pass | time | limit |", "|---|---|---|---|"]
        for command, limit_min in LIMITS_MIN.items():
            tier = self.tiers.get(command)
            tests = f"{tier['tests']:,}" if tier and tier["tests"] else "-"
            time = in_words(tier["seconds"]) if tier else "-"
            rows.append(f"| `{command}` | {tests} | {time} | {limit_min} min |")
        return "\n".join([*rows, "", f"Measured on {self.machine}."])


def read_times(file: Path = FILE) -> Times:
    """Return what is recorded; nothing where there is no file."""
    if not file.exists():
        return Times()
    found = json.loads(file.read_text())
    slow = {name: Passed(*each) for name, each in found.pop("slow").items()}
    return Times(slow, **found)


def write_times(times: Times, file: Path = FILE) -> None:
    """Write it, a line for each test."""
    slow = {name: [passed.seconds, passed.commit] for name, passed in sorted(times.slow.items())}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in slow.items())
    head = {name: value for name, value in asdict(times).items() if name != "slow"}
    text = json.dumps(head, indent=1)[:-2]
    file.write_text(f'{text},\n "slow": {{\n{lines}\n }}\n}}\n')


def newest_first(root: Path, commits: set[str]) -> list[str]:
    """Return commits from the newest to the oldest; those that are unknown here, or on another branch, come last."""
    place = {commit: number for number, commit in enumerate(_git(root, "rev-list", "HEAD").split())}
    return sorted(commits, key=lambda commit: place.get(commit, len(place)))


def changed_since(root: Path, commit: str) -> set[str]:
    """Return the rooms and the files of tests that have changed since a commit: all where it is unknown here."""
    is_known = commit in _git(root, "rev-list", "HEAD").split()
    names = _git(root, *(["diff", "--name-only", commit] if is_known else ["ls-files"])).splitlines()
    return {_place(name) for name in names}


def _place(name: str) -> str:
    parts = name.split("/")
    return parts[1] if parts[0] == "hvdtrain" and len(parts) > 1 else name


def head(root: Path) -> str | None:
    """Return the commit that is checked out; None where files differ from it, or there is no git."""
    if _git(root, "status", "--porcelain", "--untracked-files=no").strip():
        return None
    return _git(root, "rev-parse", "HEAD").strip() or None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def _machine() -> str:
    found: dict[str, Any] = {"Python": platform.python_version(), "torch": metadata.version("torch")}
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{len(os.sched_getaffinity(0))} cores, {versions}, set up before"
