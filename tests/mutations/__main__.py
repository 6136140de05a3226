"""``python -m tests.mutations [ROOM ...] [--only N,N]``: which tier of the tests catches each mutation of `table`.

Each mutation is written into a copy of the checkout, never into the checkout itself. Its tests run there: first
those of `make test`, then the slow ones. A failure counts only if the same test passes without the mutation. A core
tries one mutation at a time, in a copy of its own.

Libraries rejected: mutmut and cosmic-ray. They make mutants at random, by the thousand, and run all tests on each. Here
it is a fixed list that people chose, each a mistake that once was or may be made, and some tests start whole jobs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from tests.mutations.table import MUTATIONS, ROOMS, Mutation, room_of
from tests.runner.sessions import BUILD, mpirun_variables, variables
from tests.runner.times import head

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = "tests/parallel"
"""Tests that `make test` runs on two ranks."""
TIERS = {"make test": "not slow", "make test-all": "slow"}
TIMEOUT_S = 600
EXPECTED_S = 60
RESULTS = BUILD / "mutations.json"
_PASSED, _USAGE, _NOTHING_COLLECTED, _TIMED_OUT = 0, 4, 5, 124
_FAILED = re.compile(r"(?:^FAILED|^ERROR|rank \d+:) (tests/[^\s\[]+(?:\[.*?\])?)(?= - |$)", re.MULTILINE)


class Checkout:
    """A copy of the checkout in which one file at a time is mutated; no tests run there after `until`."""

    def __init__(self, folder: Path, until: float) -> None:
        self._until = until
        self.root = folder / "checkout"
        self._temporary = folder / "t"
        self._bytecode = folder / "bytecode"
        self._texts: dict[Path, str] = {}
        self._writes = count(1)
        self._began_s = time.time()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    def write(self, mutation: Mutation, *, mutated: bool) -> None:
        """Write the file of a mutation, mutated or as it was, with a time of its own: Python knows bytecode by it."""
        path = self.root / "hvdtrain" / mutation.file
        text = self._texts.setdefault(path, path.read_text(encoding="utf-8"))
        path.write_text(text.replace(mutation.old, mutation.new) if mutated else text, encoding="utf-8")
        at_s = self._began_s + 10 * next(self._writes)
        os.utime(path, (at_s, at_s))

    def run(self, tests: list[str], marked: str) -> tuple[int, str]:
        """Exit code and output of the first of these test runs that fails: those on ranks by themselves."""
        code, output = _NOTHING_COLLECTED, ""
        on_ranks = [test for test in tests if test.startswith(PARALLEL)]
        for chosen, command in ((on_ranks, ["mpirun", "-np", "2"]), ([t for t in tests if t not in on_ranks], [])):
            if chosen:
                options = ["-q", "-x", "-p", "no:cacheprovider", "-m", marked]
                found, output = self._start([*command, sys.executable, "-m", "pytest", *options, *chosen])
                if found not in (_PASSED, _NOTHING_COLLECTED):
                    return found, output
                code = min(code, found)
        return code, output

    def _start(self, argv: list[str]) -> tuple[int, str]:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        own = {"PYTHONPATH": str(self.root), "TMPDIR": str(self._temporary), "PYTHONPYCACHEPREFIX": str(self._bytecode)}
        output = self._temporary.with_name("output")
        with output.open("wb") as file:
            process = subprocess.Popen(
                argv,
                cwd=self.root,
                env=variables(os.environ) | mpirun_variables() | own,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.0, min(TIMEOUT_S, self._until - time.time())))
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired) or time.time() >= self._until:
                    raise
                code = _TIMED_OUT
        return code, output.read_text(encoding="utf-8", errors="replace")


def outcome(checkout: Checkout, mutation: Mutation) -> tuple[str, str]:
    """A tier, "survived" or "no tests"; and the test that failed, or what else is to be said."""
    ran = False
    for tier, marked in TIERS.items():
        checkout.write(mutation, mutated=True)
        try:
            code, output = checkout.run(list(mutation.tests), marked)
        finally:
            checkout.write(mutation, mutated=False)
        if code == _USAGE:
            return "no tests", "pytest cannot be run so"
        ran |= code != _NOTHING_COLLECTED
        if code in (_PASSED, _NOTHING_COLLECTED):
            continue
        found = _FAILED.search(output)
        if checkout.run([found[1]] if found else list(mutation.tests), marked)[0] != _PASSED:
            return "no tests", f"{found[1] if found else 'a test'} fails without the mutation too"
        return tier, "timeout" if code == _TIMED_OUT else found[1] if found else f"exit code {code}"
    return ("survived" if ran else "no tests"), ""


def main() -> int:
    """Run; 1 where a mutation is not caught, 2 where the table does not fit the source."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="See which tier catches what.")
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"{', '.join(ROOMS)} (default: all)")
    parser.add_argument("--only", metavar="N,N", help="numbers of mutations, from 1 (default: all)")
    parser.add_argument("--until", type=float, default=math.inf, metavar="TIME", help="end then")
    options = parser.parse_args()
    numbers = [int(n) for n in options.only.split(",")] if options.only else list(range(1, len(MUTATIONS) + 1))
    if options.rooms:
        numbers = [n for n in numbers if room_of(MUTATIONS[n - 1]) in options.rooms]
    wrong = [n for n, m in enumerate(MUTATIONS, 1) if (ROOT / "hvdtrain" / m.file).read_text().count(m.old) != 1]
    if wrong:
        print(f"the text to replace does not occur exactly once in the files of mutations {wrong}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    left = list(reversed(numbers))
    commit = head(ROOT)

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="mut-", ignore_cleanup_errors=True) as folder:
            checkout = Checkout(Path(folder), options.until)
            while time.time() + EXPECTED_S < options.until:
                try:
                    number = left.pop()
                except IndexError:  # the other core has taken the last one
                    return
                try:
                    rows.append(_row(checkout, number))
                except subprocess.TimeoutExpired:
                    left.append(number)
                    return

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work) for _ in os.sched_getaffinity(0)]:
            done.result()
    BUILD.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"commit": commit, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    missed = sorted(row["number"] for row in rows if not row["caught"])
    not_run = f", {len(left)} not run" if left else ""
    print(f"mutations: {len(rows) - len(missed)} caught, {len(missed)} not caught{not_run}", *missed)
    return int(bool(missed))


def _row(checkout: Checkout, number: int) -> dict[str, Any]:
    """Try a mutation, and print what became of it."""
    mutation, began_s = MUTATIONS[number - 1], time.monotonic()
    caught_by, test = outcome(checkout, mutation)
    seconds = round(time.monotonic() - began_s, 1)
    print(f"{number:3} {mutation.file:40} {caught_by:13} {seconds:6.1f} s  {test}", flush=True)
    row = {"number": number, "room": room_of(mutation), "file": mutation.file, "breaks": mutation.breaks}
    return {**row, "outcome": caught_by, "caught": caught_by in TIERS, "test": test, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
