"""The runner of tests: what a failure means, and which slow tests come first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runner.order import Passed, by_worth, rooms_of
from tests.runner.plugin import NOT_RUN, plain
from tests.runner.results import FAILED, PASSED, SKIPPED, Outcome, judged, read_results, summary
from tests.runner.times import Times, read_times, write_times
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S

FAILS_ONCE = """
import os
from pathlib import Path

def test_once():
    seen = Path(f"seen-{Path(__file__).stem}-{os.environ.get('OMPI_COMM_WORLD_RANK', 'alone')}")
    if not seen.exists():
        seen.touch()
        FAILS
"""
FAILS = 'raise AssertionError("the first time")'


def lines(file: Path, *written: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in written))
    return file


def test_a_test_without_an_outcome_was_lost_with_its_process(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "results",
        {"tests": ["a", "b"]},
        {"begins": "a"},
        {"test": "a", "outcome": PASSED, "slow": False, "error": None},
        {"test": "a", "seconds": 1.5},
        {"begins": "b"},
    )
    file.write_text(file.read_text() + '{"test": "b", "outc')
    found = read_results([file])
    assert found["a"] == Outcome(PASSED, seconds=1.5)
    assert found["b"].kind == FAILED


def test_a_failure_in_teardown_or_on_one_rank_is_one_of_the_test(tmp_path: Path) -> None:
    passes = {"test": "a", "outcome": PASSED, "slow": True, "error": None}
    fails = {"test": "a", "outcome": FAILED, "slow": True, "error": "it leaks"}
    assert read_results([lines(tmp_path / "0", passes, fails)])["a"] == Outcome(FAILED, True, 0.0, "it leaks")
    ranks = [lines(tmp_path / "0", passes), lines(tmp_path / "1", fails), lines(tmp_path / "2", passes)]
    assert read_results(ranks)["a"].kind == FAILED


@pytest.mark.parametrize(
    ("again", "is_unstable"),
    [
        ([PASSED, PASSED], True),
        ([PASSED, FAILED], False),
        ([PASSED, SKIPPED], False),
        ([PASSED, None], False),
        ([], False),
    ],
)
def test_only_what_passes_each_time_is_unstable(again: list[str | None], is_unstable: bool) -> None:
    runs = [{} if kind is None else {"a": Outcome(kind)} for kind in again]
    assert judged({"a": Outcome(FAILED), "b": Outcome(PASSED)}, runs) == {"a": is_unstable}


def test_the_last_lines_count_every_test_once() -> None:
    kinds = {"a": PASSED, "b": FAILED, "c": FAILED, "d": SKIPPED, "e": NOT_RUN}
    text = summary({name: Outcome(kind) for name, kind in kinds.items()}, ["b"], 61)
    assert text == "1 min 1 s, 1 unstable, 1 not run\ntotal: 2 passed, 1 failed, 1 skipped"


def test_groups_are_no_part_of_an_id() -> None:
    assert [plain(name) for name in ("t.py::a@hosts", "t.py::a[x@y]", "t.py::a[x@y]@hosts")] == [
        "t.py::a",
        "t.py::a[x@y]",
        "t.py::a[x@y]",
    ]


def test_rooms_are_those_that_a_file_imports_or_starts() -> None:
    assert rooms_of("from hvdtrain.launch.spec import JobSpec\nimport hvdtrain.files") == {"launch", "files"}
    assert rooms_of('run(["-m", "hvdtrain", "doctor"])') == {"doctor"}
    assert "exchange" in rooms_of("def test_x(gallery): pass")
    assert rooms_of("import os\n'a launcher of doctors'") == frozenset()


def test_the_order_of_worth() -> None:
    names = {
        "tests/fit/test_a.py::old": Passed(9, "c1"),
        "tests/fit/test_a.py::sample": Passed(1, "c3"),
        "tests/fit/test_a.py::new": Passed(9, "c3"),
        "tests/fit/test_a.py::old_and_long": Passed(20, "c1"),
        "tests/cli/test_b.py::changed": Passed(2, "c2"),
        "tests/cli/test_b.py::changed_and_long": Passed(3, "c2"),
        "tests/laws/test_l.py::law[one]": Passed(4, "c3"),
        "tests/laws/test_l.py::law[two]": Passed(5, "c3"),
        "tests/laws/test_l.py::other[one]": Passed(30, "c3"),
        "tests/hosts/test_h.py::of_hosts": Passed(1, "c3"),
    }
    changed = {"c3": {"README.md"}, "c2": {"cli", "README.md"}, "c1": {"cli", "launch", "README.md"}}
    rooms = {"tests/cli/test_b.py": frozenset({"cli"}), "tests/fit/test_a.py": frozenset({"fit"})}
    assert [name.partition("::")[2] for name in by_worth(names, changed, rooms)] == [
        *("of_hosts", "changed_and_long", "changed"),
        *("other[one]", "law[one]", "sample"),
        *("old_and_long", "old", "new", "law[two]"),
    ]


def test_times_are_read_as_they_were_written(tmp_path: Path) -> None:
    times = Times({"tests/a.py::b": Passed(1.5, "c1"), "tests/a.py::gone": Passed(1, "c1")})
    outcomes = {"tests/a.py::b": Outcome(FAILED, True, 2.0), "tests/a.py::c[é]": Outcome(PASSED, True, 3.04)}
    times.add(".ci/run", outcomes, 90.4, "c2")
    write_times(times, tmp_path / "times.json")
    found = read_times(tmp_path / "times.json")
    assert found == times
    assert found.slow == {"tests/a.py::b": Passed(1.5, "c1"), "tests/a.py::c[é]": Passed(3.0, "c2")}
    assert "| `.ci/run` | 1 | 1 min 30 s | 75 min |" in found.table()


def test_contributing_has_the_table_of_times() -> None:
    assert read_times().table() in (ROOT / "CONTRIBUTING.md").read_text()


def planted(folder: Path, files: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the runner in a folder of its own, with these tests."""
    shutil.copytree(ROOT / "tests/runner", folder / "tests/runner", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests/support").mkdir()
    shutil.copy(ROOT / "tests/support/jobs_started.py", folder / "tests/support")
    shutil.copy(ROOT / "setup.cfg", folder)
    for name, text in {"tests/parallel/test_ranks.py": "def test_here(): pass", **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{folder}:{ROOT}"}
    command = [sys.executable, "-m", "tests.runner", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_what_fails_once_is_unstable_and_passes(tmp_path: Path) -> None:
    files = {
        "tests/test_a.py": FAILS_ONCE.replace("FAILS", FAILS),
        "tests/test_dies.py": FAILS_ONCE.replace("FAILS", "os._exit(3)"),
        "tests/parallel/test_ranks.py": FAILS_ONCE.replace("FAILS", FAILS),
    }
    files["tests/test_a.py"] += "import pytest\n@pytest.mark.parametrize('speed', ['slow'])\ndef test_fast(speed): pass"
    done = planted(tmp_path, files, "fast")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"slow": true' not in (tmp_path / "build/tests/results-2.jsonl").read_text()
    unstable = [line for line in done.stdout.splitlines() if line.startswith("unstable: ")]
    assert len(unstable) == 4  # those of parallel run on one rank, too
    assert any("test_a.py::test_once" in line and "the first time" in line for line in unstable)
    assert any("parallel/test_ranks.py::test_once on 2 ranks" in line for line in unstable)
    assert any("test_dies.py::test_once" in line for line in unstable)
    assert "4 unstable, 0 not run\ntotal: 5 passed, 0 failed, 0 skipped\n" in done.stdout


@pytest.mark.slow
def test_what_fails_again_fails_the_run_and_the_others_run(tmp_path: Path) -> None:
    files = {
        "tests/test_a.py": "def test_always(): assert 0\ndef test_good(): pass",
        "tests/test_bad.py": "def test_(:",
        "tests/parallel/test_ranks.py": "import os\ndef test_(): assert os.environ.get('OMPI_COMM_WORLD_RANK') != '1'",
    }
    done = planted(tmp_path, files, "fast")
    assert done.returncode == 1, done.stdout + done.stderr
    failures = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 3
    assert all(any(name in line for line in failures) for name in ("test_always", "test_bad.py", "on 2 ranks"))
    assert "total: 2 passed, 3 failed, 0 skipped\n" in done.stdout


@pytest.mark.slow
def test_the_deadline_leaves_slow_tests_out_and_lists_them(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.slow\ndef test_late(): assert 0\ndef test_fast(): pass\n"
    done = planted(tmp_path, {"tests/test_a.py": text}, "slow", "--deadline-min=0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  tests/test_a.py::test_late\n" in done.stdout
    assert "1 not run\ntotal: 0 passed, 0 failed, 0 skipped\n" in done.stdout
