"""The batch script for Slurm, run by bash with programs that act for Slurm's; `tests/slurm` runs it on a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.launch.spec import Batch, JobSpec, Mpi
from hvdtrain.launch.targets.schedulers import render_slurm
from tests.launch.test_real_mpis import AWKWARD
from tests.support.launch import TIMEOUT_S

MPI = {"mpi": Mpi("openmpi", "4.1.8"), "slurm_mpi": "pmix"}
SPEC = JobSpec(("--seed", "3"), 4, nodes=2, python="python3", batch=Batch(time_s=7200, requeues=3), **MPI)
PROGRAM = """#!{python}
import json, os, pathlib, signal, sys
name, here = pathlib.Path(sys.argv[0]).name, pathlib.Path(sys.argv[0]).parent
with (here / "calls").open("a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "srun":
    script = os.getppid()
    if pathlib.Path(f"/proc/{{script}}/comm").read_text() == "timeout\\n":
        script = int(pathlib.Path(f"/proc/{{script}}/stat").read_text().rpartition(")")[2].split()[1])
    for number, answer in (("USR1", "scancel"), ("TERM", "scontrol")):
        if number in os.environ["SIGNALS"]:
            os.kill(script, getattr(signal, "SIG" + number))
            while answer not in (here / "calls").read_text():
                pass
    if "preflight" in sys.argv:
        pathlib.Path(sys.argv[sys.argv.index("--write") + 1]).write_text(os.environ.get("BAD", ""))
    sys.exit(int(os.environ["CODE"]))
if name == "scontrol" and sys.argv[1] == "--oneliner":
    print("JobId=7 JobName=hvdtrain " + os.environ["FACTS"] + " Command=(null)")
"""
_SHOWN = "JobState={} Reason={} PreemptEligibleTime=2026-11-21T09:00:00 PreemptTime={}"
RUNNING, PREEMPTED = (_SHOWN.format("RUNNING", "None", at) for at in ("None", "2026-11-21T10:00:00"))
CANCELLED, OVER = (_SHOWN.format("COMPLETING", why, "None") for why in ("None", "TimeLimit"))


def run(
    folder: Path, spec: JobSpec = SPEC, *, code: int = 0, facts: str = RUNNING, signals: str = "", **variables: str
) -> tuple[int, list[list[str]], str]:
    """Run the script; its exit code, the commands it called, what it said."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("srun", "scontrol", "scancel"):
        (programs / name).write_text(PROGRAM.format(python=sys.executable))
        (programs / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
    fakes = {"CODE": str(code), "FACTS": facts, "SIGNALS": signals}
    done = subprocess.run(
        ["bash", "-s"],
        input=render_slurm(replace(spec, folder=str(folder))).text,
        env={"PATH": f"{programs}:{os.environ['PATH']}", **given, **fakes, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    calls = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    return done.returncode, calls, done.stderr


@pytest.mark.parametrize(
    ("code", "facts", "notice", "back"),
    [
        (0, RUNNING, False, False),
        (0, RUNNING, True, False),
        (143, RUNNING, True, True),
        (143, PREEMPTED, False, True),
        (130, PREEMPTED, False, True),
        (143, RUNNING, False, False),  # somebody told the ranks alone to stop
        (1, RUNNING, True, False),  # it failed when it was to save
        (1, PREEMPTED, False, False),
        (143, CANCELLED, False, False),
        (143, CANCELLED, True, False),
        (137, OVER, True, True),
        (0, OVER, True, False),
    ],
)
def test_which_jobs_are_requeued(code: int, facts: str, notice: bool, back: bool, tmp_path: Path) -> None:
    ended, calls, said = run(tmp_path, code=code, facts=facts, signals="USR1" if notice else "")
    assert (["scontrol", "requeue", "7"] in calls) == back == ("requeue 1 of 3" in said)
    assert (["scancel", "--signal=TERM", "7"] in calls) == notice and ended == code


@pytest.mark.parametrize(("facts", "back"), [(OVER, True), (CANCELLED, False), (PREEMPTED, False)])
def test_a_job_that_slurm_ends_is_handled_while_the_ranks_save(facts: str, back: bool, tmp_path: Path) -> None:
    """They may take all of the time that is left, and this shell is killed when they are."""
    ended, calls, said = run(tmp_path, code=0, facts=facts, signals="TERM")
    assert calls[1:] == [["scontrol", "--oneliner", "show", "job", "7"], *[["scontrol", "requeue", "7"]] * back]
    assert "Slurm ends the job" in said and ended == 0


@pytest.mark.parametrize(("count", "back"), [("2", True), ("3", False), ("4", False)])
def test_requeues_are_counted_and_end(count: str, back: bool, tmp_path: Path) -> None:
    _, calls, said = run(tmp_path, code=143, facts=PREEMPTED, SLURM_RESTART_COUNT=count)
    assert (["scontrol", "requeue", "7"] in calls) == back == ("after 3 requeues, the limit" not in said)


CHECKED = replace(SPEC, batch=replace(SPEC.batch, preflight=True))


def test_training_starts_after_a_preflight_without_bad_hosts(tmp_path: Path) -> None:
    ended, calls, _ = run(tmp_path, CHECKED)
    assert ended == 0
    assert [("preflight" in words, "--seed" in words) for words in calls] == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("bad", "facts", "excluded", "expected"),
    [
        ("n1\nn2\n", RUNNING, "n1,n2", "bad hosts: n1,n2: requeue 1 of 3 without them"),
        ("n1\n", f"{RUNNING} ReqNodeList=(null) ExcNodeList=(null)", "n1", "without them"),
        ("n1\n", f"{RUNNING} ExcNodeList=n[5-6],x", "n[5-6],x,n1", "without them"),
        ("", RUNNING, None, "names no host"),  # it failed, or the ranks were not connected in time
        ("n1\nn2\nn3\n", RUNNING, None, "all hosts are bad: n1,n2,n3"),  # as where a wrong --gpus_per_node is asked for
    ],
)
def test_a_job_with_bad_hosts_is_requeued_without_them(
    bad: str, facts: str, excluded: str | None, expected: str, tmp_path: Path
) -> None:
    ended, calls, said = run(tmp_path, CHECKED, code=3, facts=facts, BAD=bad)
    changes = [words for words in calls if words[:2] in (["scontrol", "requeue"], ["scontrol", "update"])]
    back = [["scontrol", "requeue", "7"], ["scontrol", "update", "JobId=7", f"ExcNodeList={excluded}"]]
    assert changes == (back if excluded else []) and expected in said
    assert ended == 3 and not any("--seed" in words for words in calls)


def test_a_notice_during_the_preflight_excludes_nothing(tmp_path: Path) -> None:
    _, calls, said = run(tmp_path, CHECKED, code=143, signals="USR1")
    assert ["scontrol", "requeue", "7"] in calls and "stopped by the notice: requeue 1 of 3" in said
    assert not any("update" in words for words in calls)


def test_arguments_and_folders_survive(tmp_path: Path) -> None:
    folder = tmp_path / "it's\na folder; $(exit 3)"
    folder.mkdir()
    code, calls, _ = run(folder, replace(SPEC, arguments=AWKWARD))
    assert code == 0 and calls[0][calls[0].index("-m") :] == ["-m", "hvdtrain", *AWKWARD]


def test_a_missing_folder_starts_nothing(tmp_path: Path) -> None:
    script = render_slurm(replace(SPEC, folder=str(tmp_path / "gone"))).text
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1 and "gone" in done.stderr
