"""The runner of tests: what a failure means."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runner.plugin import _keep_files_together
from tests.runner.results import FAILED, PASSED, SKIPPED, Outcome, judged, read_results
from tests.runner.times import read_times
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S

FAILS_ONCE = """
import os
from pathlib import Path
from types import SimpleNamespace

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


def test_a_group_runs_its_files_one_after_the_other() -> None:
    """Those in no group stay in the order of worth."""
    places = [("a", "x"), ("b", "x"), ("a", ""), ("b", "x"), ("a", "x"), ("a", "y")]
    marks = {group: pytest.mark.xdist_group(group).mark if group else None for _, group in places}
    items = [SimpleNamespace(path=file, get_closest_marker={"xdist_group": marks[g]}.get) for file, g in places]
    order = {id(item): number for number, item in enumerate(items)}
    _keep_files_together(items)
    assert [order[id(item)] for item in items] == [0, 4, 1, 3, 2, 5]


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
