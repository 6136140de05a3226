"""What runs in the pods of a Kubernetes job, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.errors import BAD_HOSTS, CANNOT_START, USAGE
from hvdtrain.launch.drain import drain_hosts, find_ranks
from hvdtrain.launch.restarts import Restarts
from tests.support.launch import TIMEOUT_S

RANK = """\
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def save(*_):
    open(sys.argv[1], "w").write("loader alive" if child.poll() is None else "loader ended")
    child.kill()
    os._exit(143)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready\\n")
while True: time.sleep(0.1)
"""
"""A rank with a process of its own, which saves when it is asked to end."""

POD = """\
import os, subprocess, sys
plain = subprocess.Popen([sys.executable, "-c", "import os, time; os.write(1, b'ready\\\\n'); time.sleep(600)"])
ranks = [
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2] + name], env={**os.environ, name: "0"})
    for name in ("OMPI_COMM_WORLD_RANK", "HVDTRAIN_CHANNEL")
]
for rank in ranks: rank.wait()
plain.wait()
"""
"""A parent of ranks and of another process, as sshd is in a pod."""


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[psutil.Process]:
    argv = [sys.executable, "-c", POD, RANK, f"{tmp_path}/"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        root = psutil.Process(process.pid)
        everything = [root]
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
            everything += root.children(recursive=True)
            yield root
        finally:
            for one in everything:
                if one.is_running():
                    one.kill()


def test_a_pod_ends_when_its_ranks_have_saved(pod: psutil.Process, tmp_path: Path) -> None:
    assert len(find_ranks(pod)) == 2
    argv = [sys.executable, "-m", "hvdtrain.launch.drain", str(pod.pid)]
    subprocess.run(argv, check=True, timeout=TIMEOUT_S)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == dict.fromkeys(("OMPI_COMM_WORLD_RANK", "HVDTRAIN_CHANNEL"), "loader alive")
    assert pod.children() and not find_ranks(pod)  # what is no rank stays
    subprocess.run(argv, check=True, timeout=TIMEOUT_S)


def test_each_host_of_the_file_is_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a spy instead of ssh: process 1 of this machine has all its processes below it."""
    spy = tmp_path / "ssh"
    spy.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/said\nexit 255\n')
    spy.chmod(0o755)
    (tmp_path / "hosts").write_text("a.job.team.svc slots=8\n\nb.job.team.svc slots=8\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    drain_hosts(tmp_path / "hosts")
    said = (tmp_path / "said").read_text().splitlines()
    end = f"{sys.executable} -m hvdtrain.launch.drain 1"
    assert sorted(said) == [f"-o ConnectTimeout=10 {name}.job.team.svc {end}" for name in "ab"]


@pytest.mark.parametrize(
    ("codes", "most"), [([0], 3), ([1, 143, 0], 3), ([1, 1, 1], 2), ([1, USAGE], 9), ([1, BAD_HOSTS], 9), ([1], 0)]
)
def test_which_exit_codes_restart(codes: list[int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts, left = Restarts(["program"], most, first_s=0), list(codes)
    monkeypatch.setattr(restarts, "_run_once", lambda: left.pop(0))
    assert restarts.run() == codes[-1] and not left


def test_a_missing_program_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert Restarts(["./missing"], 9).run() == CANNOT_START and "./missing" in capsys.readouterr().err


def test_the_waits_double_up_to_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts, waits = Restarts(["false"], 7), list[float]()
    monkeypatch.setattr(restarts._ended, "wait", waits.append)
    assert restarts.run() == 1 and waits == [10, 20, 40, 80, 160, 300, 300]


@pytest.mark.parametrize("code", [None, 1])
def test_sigterm_ends_the_restarts(code: int | None, tmp_path: Path) -> None:
    """While the program runs, and in the wait before it is started again."""
    body = "import time; print('up', flush=True); time.sleep(600)" if code is None else f"raise SystemExit({code})"
    argv = [sys.executable, "-m", "hvdtrain.launch.restarts", "9", sys.executable, "-c", body]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        waits = "hvdtrain launch: ended with exit code 1: restart 1 of 9 in 10 s\n"
        assert process.stdout.readline() == ("up\n" if code is None else waits)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == (143 if code is None else code)
        assert process.stdout.read() == ""
