"""The outcomes of tests, read from the files that `tests.runner.plugin` writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.runner.plugin import NOT_RUN

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
LOST = "its process ended before it did"


@dataclass(frozen=True)
class Outcome:
    """What became of one test.

    Attributes:
        kind: `PASSED`, `SKIPPED`, `FAILED` or `NOT_RUN`.
        slow: whether it is marked so.
        seconds: of set-up, call and teardown.
        error: the first line of what went wrong.
    """

    kind: str
    slow: bool = False
    seconds: float = 0.0
    error: str | None = None


def read_results(files: Iterable[Path]) -> dict[str, Outcome]:
    """Return the outcome of each test that these processes had; one that has none has failed.

    The files are those of one run: of the controller, or of each rank. A failure on one rank is one of the test.
    """
    found: dict[str, Outcome] = {}
    for file in files:
        of_one = _read(file)
        for name, outcome in of_one.items():
            before = found.get(name)
            found[name] = before if before is not None and before.kind == FAILED else outcome
    return found


def _read(file: Path) -> dict[str, Outcome]:
    collected: list[str] = []
    found: dict[str, Outcome] = {}
    for text in file.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # cut off: its process was killed
            continue
        if "tests" in line:
            collected = line["tests"]
        elif "outcome" in line:
            before = found.get(line["test"])
            if before is None or line["outcome"] == FAILED:
                found[line["test"]] = Outcome(line["outcome"], line["slow"], error=line["error"])
        elif "seconds" in line and line["test"] in found:
            found[line["test"]] = replace(found[line["test"]], seconds=line["seconds"])
    return {**{name: Outcome(FAILED, error=LOST) for name in collected}, **found}


def cut_off(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes of a run that was ended at its time limit: a test that had not ended counts as not run."""
    return {name: Outcome(NOT_RUN) if outcome.error == LOST else outcome for name, outcome in outcomes.items()}


def failed(outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the tests that have failed."""
    return {name: outcome for name, outcome in outcomes.items() if outcome.kind == FAILED}


def judged(first: Mapping[str, Outcome], again: Iterable[Mapping[str, Outcome]]) -> dict[str, bool]:
    """Return of each failed test whether it is unstable: whether it passed each time that it ran again."""
    runs = list(again)
    return {
        name: bool(runs) and all(run.get(name, Outcome(FAILED)).kind == PASSED for run in runs)
        for name in failed(first)
    }


def in_words(seconds: float) -> str:
    """Return a duration in minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def summary(outcomes: Mapping[str, Outcome], unstable: Iterable[str], seconds: float) -> str:
    """Return two lines that count all tests; an unstable one counts as passed."""
    passed_later = set(unstable)
    counts = Counter(PASSED if name in passed_later else outcome.kind for name, outcome in outcomes.items())
    total = ", ".join(f"{counts[kind]} {kind}" for kind in (PASSED, FAILED, SKIPPED))
    return f"{in_words(seconds)}, {len(passed_later)} unstable, {counts[NOT_RUN]} not run\ntotal: {total}"
