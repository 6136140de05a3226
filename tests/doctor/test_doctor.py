"""``hvdtrain doctor`` as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import doctor
from hvdtrain.doctor import report
from hvdtrain.doctor.facts.child import ask
from hvdtrain.doctor.finding import Finding
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.rules import Setting
from hvdtrain.runtime.tuning import Choice
from tests.support.doctor import DOCTOR
from tests.support.launch import ENVIRONMENT, TIMEOUT_S, run

CHOICES = [
    Choice(Setting("A_VARIABLE", "1", "it helps", "10 ms without, 5 with", before="torch")),
    Choice(Setting("B_VARIABLE", "2", "so too", "less", before="torch"), kept="kept B_VARIABLE=3 of the environment"),
]
FINDINGS = [
    Finding("torch", "ok", "2.13.0+cpu"),
    Finding("horovod", "warning", "not installed", "more than one rank needs it", "hvdtrain build-horovod"),
    Finding("shm", "ok", "3.0 GiB", minor=True),
    Finding("mpirun", "broken", "MPICH", "another MPI", "use the right one"),
]


def doctor_here(*options: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *DOCTOR, *options]
    return subprocess.run(argv, env=ENVIRONMENT | (environment or {}), capture_output=True, text=True, check=False)


def test_json_is_one_object() -> None:
    done = doctor_here("--json", environment={"THP_MEM_ALLOC_ENABLE": "0", "TOKEN_OF_A_TRACKER": "not to be told"})
    assert "not to be told" not in done.stdout
    said = json.loads(done.stdout)
    assert done.returncode == ["ok", "warning", "broken"].index(said["level"])
    assert said["format"] == 1
    assert said["rank"]["launcher"] == "none"
    checks = {check["name"]: check for check in said["checks"]}
    assert checks["torch"]["level"] == "ok"
    assert {"hvdtrain", "horovod", "mpirun", "launcher", "packages", "host", "gpus"} <= checks.keys()
    settings = {setting["variable"]: setting for setting in said["tuning"]}
    assert settings["THP_MEM_ALLOC_ENABLE"]["applied"] is False
    assert "THP_MEM_ALLOC_ENABLE=0" in settings["THP_MEM_ALLOC_ENABLE"]["kept"]
    assert done.stderr == ""


@pytest.mark.slow
def test_two_ranks_speak_once(tmp_path: Path) -> None:
    done = run([*DOCTOR, "--json"], size=2, cwd=tmp_path, check=False)
    said = json.loads(done.stdout.splitlines()[0])
    assert said["rank"]["size"] == 2
    assert done.stdout.count('"format"') == 1


@pytest.mark.slow
def test_variables_that_make_no_sense_are_broken() -> None:
    done = doctor_here("--json", environment={"HOROVOD_RANK": "0"})
    said = json.loads(done.stdout)
    checks = {check["name"]: check for check in said["checks"]}
    assert done.returncode == 2
    assert checks["launcher"]["level"] == "broken"
    assert "HOROVOD_SIZE" in checks["launcher"]["why"]
    assert checks["torch"]["level"] == "ok"  # the rest is looked at all the same
    assert done.stderr == ""


def test_no_links_are_measured_where_ranks_do_not_know_each_other() -> None:
    done = doctor_here("--probe", environment={"HOROVOD_RANK": "0"})
    assert done.returncode == 2
    assert done.stdout.startswith("error: ")
    assert "HOROVOD_SIZE" in done.stdout


def test_a_broken_horovod_is_found_without_dying_of_it(tmp_path: Path) -> None:
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.28.1'\n")
    (package / "torch/__init__.py").write_text("import os\nos.abort()\n")
    metadata = tmp_path / "horovod-0.28.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    done = doctor_here("--json", environment={"PYTHONPATH": str(tmp_path)})
    (check,) = [check for check in json.loads(done.stdout)["checks"] if check["name"] == "horovod"]
    assert done.returncode == 2
    assert check["level"] == "broken"
    assert "signal 6" in check["why"]
    assert check["mend"] == "hvdtrain build-horovod"


def test_horovod_for_another_torch_is_broken(tmp_path: Path) -> None:
    metadata = tmp_path / "horovod-0.28.1.dist-info"
    metadata.mkdir()
    version = "0.28.1+torch1.13.0.cpu.openmpi4.1.8"
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
    done = doctor_here(environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("broken") and "horovod" in line]
    assert version in line
    assert "another torch" in done.stdout
    assert "fix: hvdtrain build-horovod" in done.stdout


@pytest.mark.parametrize(
    ("code", "values", "error"),
    [
        ("print('noise'); print('{\"a\": 1}')", {"a": 1}, None),
        ("raise SystemExit(3)", {}, "exit status 3"),
        ("raise ImportError('undefined symbol: x')", {}, "ImportError: undefined symbol: x"),
        ("import os; os.abort()", {}, "the process was ended by signal 6"),
        ("print(7)", {}, "exit status 0"),
        ("while True: pass", {}, "no answer in 1 s"),
    ],
)
def test_a_child_process_answers_or_reports_why_not(code: str, values: dict[str, int], error: str | None) -> None:
    answer = ask(code, timeout_s=1 if "while" in code else TIMEOUT_S)
    assert answer.values == values
    assert answer.error is error is None or str(error) in str(answer.error)


def test_lines_list_problems_first_then_all_findings() -> None:
    text = list(report.lines(FINDINGS, CHOICES))
    assert [line.split()[:2] for line in text if line.startswith(("ok", "warning", "broken"))] == [
        ["broken", "mpirun"],
        ["warning", "horovod"],
        ["ok", "torch"],
        ["ok", "also"],
    ]
    whole = "\n".join(text)
    for part in ("more than one rank needs it", "fix: hvdtrain build-horovod", "A_VARIABLE=1", "because: it helps"):
        assert part in whole
    for part in ("effect: 10 ms without, 5 with", "kept B_VARIABLE=3 of the environment", "2 would be set: so too"):
        assert part in whole
    assert "also    shm (details" in whole and "3.0 GiB" not in whole
    assert text[-1] == "1 broken: mpirun; 1 warning: horovod"


def test_the_last_line_counts() -> None:
    assert report.summary(FINDINGS[:1]) == "no problems: 1 checks"
    assert report.summary([FINDINGS[1], FINDINGS[1]]) == "2 warnings: horovod, horovod"


def test_json_has_all_in_the_order_of_the_checks() -> None:
    said = report.as_json(RankInfo(), FINDINGS, CHOICES)
    assert said["level"] == "broken"
    checks = said["checks"]
    assert isinstance(checks, list)
    assert [check["name"] for check in checks] == ["torch", "horovod", "shm", "mpirun"]
    assert checks[2]["found"] == "3.0 GiB"


def test_a_terminal_gets_the_same_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "prepare", lambda: (RankInfo(), CHOICES))
    monkeypatch.setattr(doctor, "gather", lambda *facts: None)
    monkeypatch.setattr(doctor, "examine", lambda facts: FINDINGS)
    monkeypatch.setenv("COLUMNS", "200")
    assert doctor.main([]) == 2
    plain = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert doctor.main([]) == 2
    table = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert set(plain.lower().replace(":", "").split()) == set(table.lower().replace(":", "").split())


def test_ranks_other_than_0_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "prepare", lambda: (RankInfo("slurm", 1, 2, 1, 2), CHOICES))
    assert doctor.main(["--json"]) == 0
    assert capsys.readouterr().out == ""
