"""Two ranks on two hosts, by every launcher that crosses them; the link between; nothing stays behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvdtrain.observe.past_journal import read_steps
from tests.support.host import pid_namespace, until
from tests.support.launch import train
from tests.support.two_hosts import LINK, OWN, TwoHosts, two_hosts

ROOT = Path(__file__).parents[2]
FOUND = {"PYTHONPATH": str(ROOT)}
TOY = [f"--task={ROOT}/tests/support/toy.py:toy", "--train.global_batch=9", "--train.micro_batch=2", "--train.steps=6"]
LAUNCHERS: dict[str, Callable[..., subprocess.CompletedProcess[str]]] = {
    "mpirun": lambda hosts, *args, **how: hosts.mpirun(*args, **how),
    "horovodrun": lambda hosts, *args, **how: hosts.horovodrun(*args, **how),
    "horovodrun --gloo": lambda hosts, *args, **how: hosts.horovodrun(*args, gloo=True, **how),
}
WHO = """
import json, platform, sys
from pathlib import Path
from hvdtrain.runtime.tuning import prepare
info, choices = prepare()
from hvdtrain.comm.start import start_comm
import torch
comm = start_comm(info)
summed = torch.ones(1_000_000)
comm.allreduce(summed, name="x").wait()
facts = {"host": platform.node(), "size": comm.size, "local_size": comm.local_size, "one_host": info.one_host}
facts["set"] = [choice.setting.variable for choice in choices if choice.applied]
Path(sys.argv[1], str(comm.rank)).write_text(json.dumps({**facts, "sum": float(summed[0])}))
"""
OWNER = """
import json, signal
from tests.support.two_hosts import two_hosts
with two_hosts() as hosts:
    hosts.b.popen(["sleep", "1000"])
    print(json.dumps([hosts.a.namespace, hosts.b.namespace]), flush=True)
    signal.pause()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=float(sys.argv[2])).recv(4)"


def _losses(run: Path) -> list[float]:
    steps = read_steps(run / "journal.jsonl")
    return [steps[step]["loss"] for step in sorted(steps)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the job on one rank of one host."""
    folder = tmp_path_factory.mktemp("alone")
    train(*TOY, f"--run_dir={folder / 'run'}", cwd=folder)
    return _losses(folder / "run")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_on_two_hosts_has_the_losses_of_one_rank(
    launcher: str, hosts: TwoHosts, alone: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    sent = hosts.a.sent_bytes(), hosts.b.sent_bytes()
    LAUNCHERS[launcher](
        hosts,
        [sys.executable, "-m", "hvdtrain", *TOY, f"--run_dir={run}"],
        cwd=ROOT,
        environment={"PYTHONPATH": str(ROOT)},
    )
    assert len(alone) == 6
    assert _losses(run) == pytest.approx(alone, rel=2e-6)
    assert hosts.a.sent_bytes() > sent[0]
    assert hosts.b.sent_bytes() > sent[1]


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun --gloo"])
def test_ranks_know_that_they_are_on_two_hosts(launcher: str, hosts: TwoHosts, tmp_path: Path) -> None:
    before = hosts.a.sent_bytes(), hosts.b.received_bytes()
    LAUNCHERS[launcher](hosts, [sys.executable, "-c", WHO, str(tmp_path)], cwd=ROOT, environment=FOUND)
    a, b = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert [a["host"], b["host"]] == ["a", "b"]
    for rank in (a, b):
        assert (rank["size"], rank["local_size"], rank["one_host"], rank["sum"]) == (2, 1, False, 2.0)
        assert "OMPI_MCA_coll_tuned_allreduce_algorithm" not in rank["set"]
    assert a["set"] == b["set"]
    assert hosts.a.sent_bytes() - before[0] > 4_000_000  # the tensor went by the link, not by shared memory
    assert hosts.b.received_bytes() - before[1] > 4_000_000


def test_a_throttled_link_is_no_faster_than_its_rate(hosts: TwoHosts) -> None:
    hosts.throttle("20mbit")
    burst, sent = 256 * 1024, 2_000_000
    start = time.monotonic()
    hosts.a.run(["ssh", "b", "head", "-c", str(sent), "/dev/zero"])
    assert time.monotonic() - start > 8 * (sent - burst) / 20e6
    assert hosts.b.sent_bytes() > sent


def test_a_cut_link_is_silent_until_it_is_mended(hosts: TwoHosts) -> None:
    def connect(timeout_s: float) -> subprocess.CompletedProcess[str]:
        return hosts.a.run([sys.executable, "-c", CONNECT, hosts.b.address, str(timeout_s)], check=False)

    hosts.cut()
    hosts.throttle("1gbit")  # does not mend
    received = hosts.b.received_bytes()
    assert "TimeoutError" in connect(0.5).stderr
    assert hosts.b.received_bytes() == received
    hosts.mend()
    assert "1Gbit" in hosts.a.run(["tc", "qdisc", "show", "dev", LINK]).stdout
    assert connect(60).returncode == 0


def test_a_server_with_another_key_is_refused_whatever_the_launcher_asks_for(hosts: TwoHosts) -> None:
    unknown = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    assert hosts.a.run(["ssh", "b", "hostname"]).stdout == "b\n"
    assert hosts.a.run(["ssh", *unknown, "b", "hostname"], check=False).returncode == 255


@pytest.mark.parametrize("end", ["the block is left", "an error", "an interrupt"])
def test_nothing_stays_when(end: str, hosts: TwoHosts) -> None:
    """Other hosts are created and removed at the same time."""
    error = {"an error": RuntimeError, "an interrupt": KeyboardInterrupt}.get(end)
    made, left = [], []
    try:
        with two_hosts() as own:
            made += [own.a, own.b]
            left.append(own.b.popen(["sleep", "1000"]))
            until(lambda: len(own.b.processes()) == 3, "a process beside the holder and the server")
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert [process.wait() for process in left] == [-signal.SIGKILL]
    assert [host.processes() for host in made] == [set(), set()]
    assert not OWN.exists()  # on the disk that all share
    assert hosts.a.run(["ssh", "b", "hostname"]).stdout == "b\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_of_an_owner_that_was_killed(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        namespaces = json.loads(owner.stdout.readline())
        until(lambda: [len(_members(n)) for n in namespaces] == [2, 3], "a process beside the holders and the servers")
        owner.send_signal(number)
    until(lambda: not any(map(_members, namespaces)), "the processes of a killed owner to end")


def _members(namespace: str) -> list[int]:
    return [pid for pid in psutil.pids() if pid_namespace(pid) == namespace]
