from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hvdtrain.cli import doctor
from hvdtrain.doctor import report
from hvdtrain.doctor.report import Finding, known, known_cause
from hvdtrain.programs import ask
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.rules import Setting
from hvdtrain.runtime.tuning import Choice
from tests.support.doctor import DOCTOR
from tests.support.launch import ENVIRONMENT, TIMEOUT_S

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


def test_json_is_one_object_without_secrets() -> None:
    variables = {"THP_MEM_ALLOC_ENABLE": "0", "TOKEN_OF_A_TRACKER": "not to be told"}
    done = subprocess.run(
        [sys.executable, *DOCTOR, "--json"], env=ENVIRONMENT | variables, capture_output=True, text=True
    )
    assert "not to be told" not in done.stdout and done.stderr == ""
    said = json.loads(done.stdout)
    assert done.returncode == ["ok", "warning", "broken"].index(said["level"])
    assert said["format"] == 1 and said["rank"]["launcher"] == "none"
    checks = {check["name"]: check for check in said["checks"]}
    assert checks["torch"]["level"] == "ok"
    assert {"hvdtrain", "horovod", "mpirun", "launcher", "packages", "host", "gpus"} <= checks.keys()
    settings = {setting["variable"]: setting for setting in said["tuning"]}
    assert settings["THP_MEM_ALLOC_ENABLE"]["applied"] is False
    assert "THP_MEM_ALLOC_ENABLE=0" in settings["THP_MEM_ALLOC_ENABLE"]["kept"]


def test_variables_that_make_no_sense_are_broken_and_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    given: list[Any] = []
    monkeypatch.setattr(doctor, "gather", lambda *facts: given.extend(facts))
    monkeypatch.setattr(doctor, "examine", lambda facts: FINDINGS)
    assert doctor.main(["--json"]) == 2
    info, *_, refusal = given
    assert info.size == 1 and "HOROVOD_SIZE" in str(refusal)


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


def test_lines_list_problems_first_then_all_findings_then_the_settings() -> None:
    text = list(report.Report(FINDINGS, RankInfo(), CHOICES).lines())
    marks = [line.split()[:2] for line in text if line.startswith(("ok", "warning", "broken", "set ", "left"))]
    assert marks == [
        *(["broken", "mpirun"], ["warning", "horovod"], ["ok", "torch"], ["ok", "also"]),
        *(["set", "A_VARIABLE=1"], ["left", "B_VARIABLE:"]),
    ]
    whole = "\n".join(text)
    for part in ("more than one rank needs it", "fix: hvdtrain build-horovod", "it helps", "10 ms", "B_VARIABLE=3 of"):
        assert part in whole
    assert "also    shm" in whole and "3.0 GiB" not in whole
    assert text[-1] == "1 broken: mpirun; 1 warning: horovod"
    assert report.summary(FINDINGS[:1]) == "no problems: 1 checks"
    assert report.summary([FINDINGS[1], FINDINGS[1]]) == "2 warnings: horovod, horovod"


def test_a_terminal_gets_all_findings_and_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda *facts: None)
    monkeypatch.setattr(doctor, "examine", lambda facts: FINDINGS)
    for info, code in ((RankInfo(), 2), (RankInfo("slurm", 1, 2, 1, 2), 0)):
        monkeypatch.setattr(doctor, "prepare", lambda info=info: (info, CHOICES))
        assert doctor.main([]) == code
        shown = capsys.readouterr().out
        assert all((name in shown) == (code == 2) for name in ("torch", "horovod", "shm", "mpirun", "A_VARIABLE=1"))


def test_causes_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "hvdtrain.yaml_file", raising=False)
    assert known_cause("horovod", "No module named 'distutils'")[1] == "pip install setuptools"
    assert known("variables")
