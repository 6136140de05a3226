"""``python -m tests.runner COMMAND``: runs the tests, and decides what their failures mean.

fast       what `make test` runs: on two ranks, then those that are not slow
slow       what `make test-all` runs
all        what ``.ci/run`` runs: both, with lint beside them; then mutations of rooms that have changed
unstable   repeat tests beside busy cores: python -m tests.runner unstable TEST ...
lint       ruff, mypy and wording
check      in a minute: lint, collection of all tests, tests of the structure
record     write what the last run of each command measured into tests/runner/times.json and CONTRIBUTING.md
tiers      print the table of commands and times for CONTRIBUTING.md

A test that failed runs again at the end, alone, twice. It fails the run if it fails once more; if it passes both times,
it is named as unstable, which is a fault of the test or of the product: mend it before anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict

from tests.mutations.table import MUTATIONS, ROOMS, room_of
from tests.runner.lint import beside, check, lint
from tests.runner.order import by_age
from tests.runner.plugin import NOT_RUN
from tests.runner.results import FAILED, PASSED, Outcome, failed, judged, summary
from tests.runner.sessions import BUILD, PARALLEL, ROOT, alone, busy, on_all_cores, on_two_ranks, temporary_in_memory
from tests.runner.times import changed_since, head, newest_first, read_times, write_times

TRIED = BUILD / "mutations.json"
AGAIN_MIN = 10.0
"""How long tests may run after the deadline: half of it those that have begun, then those that run again."""
MUTATIONS_MIN = 5.0
"""How long mutations may take."""
TWICE = 2
ON_RANKS = " on 2 ranks"


def main() -> int:
    """Run a command; 0 where all is well."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.runner", description=__doc__, formatter_class=plain)
    parser.add_argument("command", choices=["fast", "slow", "all", "unstable", "lint", "check", "record", "tiers"])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="ids of tests, for unstable")
    parser.add_argument("--times", type=int, default=20, metavar="N", help="of unstable: how often (default: 20)")
    parser.add_argument("--deadline-min", type=float, metavar="M", help="begin no slow test that would end later")
    parser.add_argument("--began", type=float, default=time.time(), metavar="TIME", help="when these minutes began")
    options = parser.parse_args()
    if options.command == "record":
        return record()
    if options.command == "tiers":
        print(read_times().table())
        return 0
    if options.command in ("lint", "check"):
        findings = lint() if options.command == "lint" else check()
        print(findings or f"{options.command}: nothing found")
        if options.command == "check" and not findings:
            _keep("make check", {}, time.time() - options.began)
        return int(bool(findings))
    if options.command == "unstable":
        return repeat(options.tests, options.times)
    deadline = None if options.deadline_min is None else options.began + 60 * options.deadline_min
    with temporary_in_memory() if options.command == "fast" else nullcontext():  # those of slow tests are many
        return run(options.command, options.began, deadline)


def run(command: str, began: float, deadline: float | None) -> int:
    """Run the tests of a command until they end, or the deadline; 1 where one fails again, or lint has findings."""
    linting = beside(lint) if command == "all" else None
    outcomes: dict[str, Outcome] = {}
    if command != "slow":
        outcomes = {name + ON_RANKS: outcome for name, outcome in on_two_ranks().items()}
    # One process has the hosts and the scheduler, and mostly waits for them.
    end = None if deadline is None else deadline + 60 * AGAIN_MIN
    halfway = None if deadline is None else deadline + 30 * AGAIN_MIN
    outcomes |= on_all_cores(*_chosen(command, deadline), more=int(command != "fast"), until=halfway)
    findings = linting() if linting is not None else ""
    again = _again(failed(outcomes), end)
    mutations = _mutations(deadline) if command == "all" and deadline is not None and all(again.values()) else 0
    seconds = time.time() - began
    _keep({"fast": "make test", "slow": "make test-all", "all": ".ci/run"}[command], outcomes, seconds)
    return max(_report(outcomes, again, findings, seconds), mutations)


def _keep(command: str, outcomes: Mapping[str, Outcome], seconds: float) -> None:
    """Keep for `record` what a command measured."""
    kept = {"commit": head(ROOT), "seconds": seconds, "outcomes": {name: asdict(o) for name, o in outcomes.items()}}
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"last-{command.replace('/', '-').replace(' ', '-')}.json").write_text(
        json.dumps({"command": command, **kept})
    )


def _mutations(deadline: float) -> int:
    """Try the mutations of rooms that have changed since theirs were all caught; 1 where one is not caught."""
    until = min(deadline, time.time() + 60 * MUTATIONS_MIN)
    caught = read_times().mutations
    since = {commit: changed_since(ROOT, commit) for commit in set(caught.values())}
    rooms = [room for room in ROOMS if room not in caught or _has_changed(room, since[caught[room]])]
    if not rooms or time.time() > until:
        return 0
    command = [sys.executable, "-m", "tests.mutations", *rooms, f"--until={until}"]
    return subprocess.run(command, cwd=ROOT).returncode


def _has_changed(room: str, since: set[str]) -> bool:
    is_leaf = room == "leaves" and any(name.endswith(".py") and "/" not in name for name in since)
    return is_leaf or not since.isdisjoint((room, f"tests/mutations/rooms/{room}.py"))


def _chosen(command: str, deadline: float | None) -> list[str]:
    """Return the options of pytest that choose the tests and order them."""
    options = {"fast": ["-m", "not slow"], "slow": ["-m", "slow"], "all": []}[command]
    if command != "slow":
        options += ["--jobs-at-most=20"]
    if command != "fast":
        slow = read_times().slow
        order = by_age(slow, newest_first(ROOT, {passed.commit for passed in slow.values()}))
        BUILD.mkdir(parents=True, exist_ok=True)
        (BUILD / "order.json").write_text(json.dumps({name: slow[name].seconds for name in order}))
        options += [f"--order={BUILD / 'order.json'}"]
    return options + ([] if deadline is None else [f"--deadline={deadline}"])


def _again(first: Mapping[str, Outcome], until: float | None) -> dict[str, bool]:
    """Run failed tests again, twice; return of each whether it is unstable."""
    if not first:
        return {}
    print(f"\n{len(first)} failed: again, alone, twice", flush=True)
    runs: list[dict[str, Outcome]] = []
    left = list(first)
    for _ in range(TWICE):
        if left and (until is None or time.time() < until):
            runs.append(_run_alone(left, until))
            left = [name for name in left if runs[-1].get(name, Outcome(FAILED)).kind == PASSED]
    return judged(first, runs if len(runs) == TWICE else [])


def _run_alone(names: list[str], until: float | None) -> dict[str, Outcome]:
    on_ranks = [name.removesuffix(ON_RANKS) for name in names if name.endswith(ON_RANKS)]
    others = [name for name in names if not name.endswith(ON_RANKS)]
    found = {n + ON_RANKS: o for n, o in on_two_ranks(listed=on_ranks, until=until).items()} if on_ranks else {}
    return found | (alone(others, until=until) if others else {})


def _report(outcomes: Mapping[str, Outcome], again: Mapping[str, bool], findings: str, seconds: float) -> int:
    not_run = [name for name, outcome in outcomes.items() if outcome.kind == NOT_RUN]
    unstable = [name for name, passes in again.items() if passes]
    wrong = [name for name, passes in again.items() if not passes]
    print()
    if findings:
        print(f"lint:\n{findings}")
    if not_run:
        print(f"not run before the deadline, {len(not_run)}:")
        print("\n".join(f"  {name}" for name in not_run))
    for name in unstable:
        print(f"unstable: {name}: {outcomes[name].error}")
    for name in wrong:
        print(f"failed: {name}: {outcomes[name].error}")
    print(summary(outcomes, unstable, seconds))
    return int(bool(findings or wrong))


def repeat(tests: list[str], times: int) -> int:
    """Run tests `times` times beside a busy loop for each core; 1 where one has failed."""
    failures: dict[str, list[str | None]] = {}
    with busy(len(os.sched_getaffinity(0))):
        for number in range(times):
            print(f"{number + 1} of {times}", flush=True)
            found = alone(tests)
            on_ranks = [test for test in tests if test.startswith(PARALLEL)]
            found |= {n + ON_RANKS: o for n, o in (on_two_ranks(listed=on_ranks) if on_ranks else {}).items()}
            for name, outcome in failed(found).items():
                failures.setdefault(name, []).append(outcome.error)
    for name, errors in failures.items():
        print(f"failed {len(errors)} of {times} times: {name}: {errors[0]}")
    print(f"{len(tests)} tests, {times} times: {len(failures)} failed at least once")
    return int(bool(failures))


def record() -> int:
    """Write what the last run of each command measured into the committed file; 2 where none was of a commit."""
    times, added = read_times(), 0
    for file in sorted(BUILD.glob("last-*.json"), key=lambda file: file.stat().st_mtime):
        if (last := json.loads(file.read_text()))["commit"]:
            outcomes = {name: Outcome(**each) for name, each in last["outcomes"].items()}
            times.add(last["command"], outcomes, last["seconds"], last["commit"])
            added += 1
    if TRIED.exists() and (tried := json.loads(TRIED.read_text()))["commit"]:
        times.add_mutations(tried["rows"], Counter(room_of(each) for each in MUTATIONS), tried["commit"])
        added += 1
    if not added:
        print("error: no run is recorded, or files had changes that were not committed", file=sys.stderr)
        print("  next: commit, then .ci/run or make test-all, then make times", file=sys.stderr)
        return 2
    write_times(times)
    page = ROOT / "CONTRIBUTING.md"
    begin, end = re.escape(times.table().partition("\n")[0]), r"Measured on [^\n]*"
    page.write_text(re.sub(rf"{begin}.*?{end}", lambda _: times.table(), page.read_text(), count=1, flags=re.DOTALL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
