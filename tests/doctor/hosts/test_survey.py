"""A survey through a stand-in for ssh: silent and noisy hosts."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hvdtrain.doctor.hosts import survey
from hvdtrain.doctor.hosts.checks import examine
from hvdtrain.doctor.hosts.survey import Hosts, Survey
from hvdtrain.launch.spec import JobSpec
from tests.support.launch import TIMEOUT_S

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests/support/fake_ssh.py"
FOR_EVER = """
import sys
from hvdtrain.__main__ import main
from hvdtrain.doctor.hosts import survey
survey.GREET_S = 1e6
sys.exit(main(sys.argv[1:]))
"""
"""hvdtrain, whose doctor waits for a host for days."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GREET_S", "_ASK_S"):
        monkeypatch.setattr(survey, name, TIMEOUT_S)


def with_ssh(tmp_path: Path) -> dict[str, str]:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir(exist_ok=True)
    ssh.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(FAKE)])} "$@"\n')
    ssh.chmod(0o755)
    return {**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def found_of(tmp_path: Path, *hosts: str, folder: str = "", environment: dict[str, str] | None = None) -> Survey:
    environment = environment or with_ssh(tmp_path)
    job = JobSpec((), len(hosts), hosts=dict.fromkeys(hosts, 1), python=sys.executable, folder=folder or str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", environment["PATH"])  # where programs are looked for
        with Hosts(job, environment) as open_hosts:
            return open_hosts.survey()


def test_noise_of_login_scripts_is_ignored(tmp_path: Path) -> None:
    found = found_of(tmp_path, "here", "noisy")
    assert not found.lost and found.facts.keys() == {"here", "noisy"}


def test_a_host_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "GREET_S", 0.5)
    before = psutil.Process().children(recursive=True)
    found = found_of(tmp_path, "mute")
    assert "timed out" in found.lost["mute"] and not found.facts
    left = [process for process in psutil.Process().children(recursive=True) if process not in before]
    assert not psutil.wait_procs(left, timeout=TIMEOUT_S)[1]


def test_a_folder_that_no_host_has_loses_no_host(tmp_path: Path) -> None:
    found = found_of(tmp_path, "here", "there", folder=str(tmp_path / "gone"))
    assert not found.lost and not found.writer and not found.sees_file
    (folder,) = [finding for finding in examine(found) if finding.name == "folder"]
    assert folder.level == "broken" and "here, there" in folder.why


def test_a_missing_ssh_is_reported(tmp_path: Path) -> None:
    found = found_of(tmp_path, "b", environment={"PATH": str(tmp_path)})
    assert "ssh" in found.lost["b"] and not found.facts
    assert examine(found)[0].level == "broken"


def _asking(doctor: int) -> list[psutil.Process]:
    """What doctor started, once that is ssh to the host, and not what is on the way to become it."""
    found = psutil.Process(doctor).children(recursive=True)
    with suppress(psutil.Error):
        if any("mute" in process.cmdline() for process in found):
            return found
    return []


def test_an_interrupt_does_not_wait_for_hosts(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FOR_EVER, "doctor", "--hosts", "mute"]
    with subprocess.Popen(
        argv,
        env=with_ssh(tmp_path),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's job in the background ignores it
    ) as doctor:
        while not (waiting := _asking(doctor.pid)):
            assert doctor.poll() is None
        doctor.send_signal(signal.SIGINT)
        _, said = doctor.communicate(timeout=TIMEOUT_S)
    assert doctor.returncode == 128 + signal.SIGINT and said == "hvdtrain: interrupted\n"
    assert not psutil.wait_procs(waiting, timeout=TIMEOUT_S)[1]
