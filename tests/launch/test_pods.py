"""What runs in the pods of a Kubernetes job, with real processes, and the changes of pods by a patch."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hvdtrain.errors import BAD_HOSTS, CANNOT_START, USAGE, ConfigError, LaunchError
from hvdtrain.launch.drain import drain_hosts, find_ranks
from hvdtrain.launch.restarts import Restarts
from hvdtrain.launch.targets.mpijob import manifest_text, patch_pod, read_pod_patch
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


TEMPLATE: dict[str, Any] = yaml.safe_load("""
spec:
  containers:
  - {name: worker, image: i, command: [sshd], env: [{name: A, value: "1"}],
     volumeMounts: [{name: runs, mountPath: /runs}]}
  volumes: [{name: runs, emptyDir: {}}]
""")


def _patched(**spec: Any) -> dict[str, Any]:
    changed = patch_pod("worker", TEMPLATE, {"spec": spec})["spec"]
    assert isinstance(changed, dict)
    return changed


def test_named_elements_are_merged_and_other_lists_replaced() -> None:
    before = repr(TEMPLATE)
    container = {
        "name": "worker",
        "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    }
    spec = _patched(containers=[container], volumes=[{"name": "more", "emptyDir": {}}], tolerations=[{"key": "a"}])
    (changed,) = spec["containers"]
    assert changed["env"] == [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]
    assert [mount["mountPath"] for mount in changed["volumeMounts"]] == ["/runs", "/more"]
    assert [volume["name"] for volume in spec["volumes"]] == ["runs", "more"]
    assert spec["tolerations"] == [{"key": "a"}]
    by_nfs = {"name": "runs", "nfs": {"path": "/"}}
    for volume in (by_nfs, {"name": "runs", "emptyDir": None, "nfs": {"path": "/", "x": None}}):
        assert _patched(volumes=[volume])["volumes"] == [by_nfs]
    assert patch_pod("worker", TEMPLATE, {"metadata": {"labels": {"env": "a"}}})["metadata"] == {"labels": {"env": "a"}}
    assert repr(TEMPLATE) == before


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"containers": [{"name": "worker", "command": ["sleep"]}]}, "command"),
        ({"containers": [{"name": "worker", "args": ["-d"]}]}, "args"),
        ({"containers": None}, "name"),
        ({"restartPolicy": "Always"}, "restartPolicy"),
        ({"containers": [{"name": "wroker", "env": []}]}, "'wroker' without an image"),
        ({"volumes": [{"emptyDir": {}}]}, "worker.spec.volumes has no name"),
        ({"containers": "worker"}, "worker.spec.containers is no list"),
        ({"containers": {"name": "worker"}}, "worker.spec.containers is no list"),
        ({"containers": [{"name": ["worker"]}]}, "worker.spec.containers has no name"),
        ({"containers": [{"name": "worker", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}, "--gpus-per-node N"),
    ],
)
def test_a_patch_that_breaks_the_job_is_refused(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(LaunchError, match=problem):
        _patched(**spec)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("a: [", "is not YAML"),
        ("- a", "is not a mapping"),
        ("", "expected: launcher or worker"),
        ("nodeSelector: {a: b}", "expected: launcher or worker"),
        ("worker: {nodeSelector: {a: b}}", "worker is no mapping(?s:.*)expected: metadata or spec"),
        ("worker: {spec: text}", "worker.spec is no mapping"),
        ("worker: {spec: !!bool maybe}", "is not YAML"),
        ("launcher: text", "launcher is no mapping"),
    ],
)
def test_a_file_that_is_no_patch_is_refused(text: str | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "patch.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises((LaunchError, ConfigError), match=rf"patch\.yaml(?s:.*){problem}"):
        read_pod_patch(file)


def test_text_stays_text_for_every_reader() -> None:
    text = manifest_text({"y": "n", "a": ["1e3", "0o7", "word", 1, True]})
    assert text == '"y": "n"\n"a":\n- "1e3"\n- "0o7"\n- word\n- 1\n- true\n'
