"""Which hosts `hvdtrain preflight` calls bad, and its table; real runs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cli import preflight as preflight_command
from hvdtrain.doctor import preflight
from hvdtrain.doctor.preflight import HostCheck, Preflight, bad_hosts, fabric, lines, unanswered
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.environment import RankInfo
from tests.support.launch import ENVIRONMENT, TIMEOUT_S, program
from tests.support.thread_comm import ThreadComm, on_ranks

GOOD = HostCheck("a", 4, 4, ("H100",) * 4, 400 << 30, inside=200e9, between=40e9)


def hosts(*between: float) -> list[HostCheck]:
    return [replace(GOOD, host=f"h{index}", between=speed) for index, speed in enumerate(between)]


@given(st.lists(st.floats(0.9, 1.1), min_size=3, max_size=40), st.data())
def test_one_slow_host_is_named(speeds: list[float], data: st.DataObject) -> None:
    assert bad_hosts(hosts(*speeds), 0, 0.5) == {}
    slow = data.draw(st.integers(0, len(speeds) - 1))
    speeds[slow] *= data.draw(st.floats(0.01, 0.4))
    assert list(bad_hosts(hosts(*speeds), 0, 0.5)) == [f"h{slow}"]


def test_a_host_is_bad_by_its_own_links_too() -> None:
    three = [replace(host, inside=speed) for host, speed in zip(hosts(1e9, 1e9, 1e9), (9e9, 4e9, 9e9), strict=True)]
    assert bad_hosts(three, 0, 0.5) == {"h1": ("4 GB/s within the host; the median is 9",)}
    assert bad_hosts(three, 0, 0.4) == {}


def test_of_two_hosts_none_is_slow_but_gpus_may_be_missing() -> None:
    two = [replace(GOOD, host="a", gpus=3, between=1e9), replace(GOOD, host="b")]
    assert bad_hosts(two, 4, 0.5) == {"a": ("3 of 4 GPUs",)}
    assert bad_hosts(two, 0, 0.5) == {}


def test_the_report_has_the_option_of_whatif_for_the_slowest_link_of_good_hosts() -> None:
    three = tuple(hosts(1e9, 9e9, 12.5e9))
    text = lines(Preflight(three, bad_hosts(three, 0, 0.5), "NCCL"))
    option = "--bandwidth_gbit 76.6"  # of which 0.94, 9 GB/s, is payload
    assert f"predict a run with it: hvdtrain timeline whatif RUN {option}" in text
    assert not any("whatif" in line for line in lines(Preflight(three[:1], {"h0": ("1 of 4 GPUs",)}, "NCCL")))


@pytest.mark.parametrize(
    ("alive", "missing"),
    [
        ({0: False, 1: True, 2: False}, ["b"]),  # rank 3 is silent, and rank 1 waits for it
        ({0: False, 1: False, 2: True, 3: True}, ["b"]),
        ({0: True, 1: True, 2: True, 3: True}, []),
        ({0: False, 1: False, 2: False, 3: False}, []),
    ],
)
def test_hosts_that_do_not_answer(alive: dict[int, bool], missing: list[str]) -> None:
    assert unanswered(alive, ["a", "a", "b", "b"]) == missing


class MemoryStore(dict[str, str]):
    """The part of torch's store that the deadline uses."""

    reports = 0

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> str:  # type: ignore[override]
        if key == "preflight/1":  # rank 1 continues to report
            self.reports += 1
            return json.dumps([self.reports, ["link/bytes/65536"]])
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self or key == "preflight/1" for key in keys)


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of deadlines, in its only item."""
    for name in ("_EVERY_S", "_LISTEN_S"):
        monkeypatch.setattr(preflight, name, 0.01)
    now_s = [0.0]
    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_at_the_deadline_rank_0_hears_who_still_reports(now_s: list[float]) -> None:
    store, ended, heard = MemoryStore(), Event(), []

    def end(alive: dict[int, bool] | None, running: dict[int, list[str]]) -> None:
        heard.append((alive, running))
        ended.set()

    store.set("preflight/2", json.dumps([7, ["link/bytes/1"]]))  # it reported once
    preflight.Deadline(5.0, 0, end).connect(store, 4, {"link/together": 0.0})  # type: ignore[arg-type]
    now_s[0] = 5.1
    assert ended.wait(TIMEOUT_S)
    running = {0: ["link/together"], 1: ["link/bytes/65536"], 2: ["link/bytes/1"]}
    assert heard == [({0: False, 1: True}, running)]


HEAD = """
Mon Jan 1 some other program's line, via NET/Socket/0 too
NCCL version 2.29.2+cuda13.0
a:10:11 [0] NCCL INFO cudaDriverVersion 13000
a:10:11 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
"""
INFINIBAND = """
a:10:12 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth1:10.1.0.1<0>
a:10:12 [0] NCCL INFO Using network IB
a:10:12 [0] NCCL INFO comm 0x5 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0
a:10:12 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA
a:10:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 3[1] [send] via NET/IB/0(1)/GDRDMA/Shared
a:10:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
a:10:12 [0] NCCL INFO ncclCommInitRank comm 0x5 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 31000 - Init COMPLETE
"""
SOCKET = """
a:10:12 [0] NCCL INFO NET/IB : No device found.
a:10:12 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]docker0:172.17.0.1<0>
b:20:22 [0] NCCL INFO Using network Socket
a:10:12 [0] NCCL INFO Channel 00 : 1[0] -> 0[0] [receive] via NET/Socket/0
"""


def test_the_fabric_of_nccl() -> None:
    assert fabric((HEAD + INFINIBAND).splitlines()) == "NET/IB mlx5_0 mlx5_1"
    assert fabric((HEAD + INFINIBAND).splitlines(), ["mlx5_0"]) == "NET/IB mlx5_0 mlx5_1"
    assert fabric(SOCKET.splitlines()) == "NET/Socket eth0 docker0"
    assert fabric(SOCKET.splitlines(), ["mlx5_0"]) == "NET/Socket eth0 docker0 (although there are mlx5_0)"
    assert fabric(["a:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read"]) == "P2P"
    assert fabric(HEAD.splitlines()) == ""


def _launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hvdtrain", "launch", *words]
    return subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_each_host_is_measured_by_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hvdtrain.comm.link_probe.HOST_SIZES", (1 << 10, 1 << 12))
    monkeypatch.setattr("hvdtrain.comm.torch_store.store_over", lambda comm: None)
    options = preflight_command.parser().parse_args(["--gpus", "1"])
    facts = [{"host": "aab"[rank], "gpus": {}, "free_bytes": 9 - rank} for rank in range(3)]
    connected: list[int] = []
    ending = SimpleNamespace(connect=lambda store, size, in_flight: connected.append(size))

    def body(comm: ThreadComm) -> Preflight:
        return preflight_command._measure(comm, options, RankInfo(), facts, tmp_path / "none.log", ending)

    found, *others = on_ranks(3, body)
    assert found == others[0] == others[1] and connected == [3, 3, 3]
    a, b = found.hosts
    assert (a.host, a.ranks, a.free_bytes, b.host, b.ranks, b.free_bytes) == ("a", 2, 8, "b", 1, 7)
    assert a.inside and a.between and b.between and b.inside is None and found.everyone
    assert found.bad == {"a": ("0 of 1 GPUs",), "b": ("0 of 1 GPUs",)}


@pytest.mark.slow
def test_ranks_without_mpi_measure_their_host(tmp_path: Path) -> None:
    options = ("--seconds", "1", "--write", "bad", "--json")
    done = _launch(tmp_path, "-np", "2", "--to", "hvdtrain", "--", "preflight", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [host["ranks"] for host in found["hosts"]] == [2]
    assert found["everyone"] > 0 and found["hosts"][0]["inside"] > 0
    assert found["by"] == "Gloo, of tensors on CPUs"
    assert (tmp_path / "bad").read_text() == ""


@pytest.mark.slow
def test_three_hosts_of_which_none_has_its_gpus(tmp_path: Path) -> None:
    """Ranks on one machine that Slurm's variable gives a node of its own each."""
    program("mpirun")
    rank = 'SLURMD_NODENAME=h$OMPI_COMM_WORLD_RANK exec "$@"'
    own = [sys.executable, "-m", "hvdtrain", "preflight", "--seconds", "1", "--write", "bad", "--gpus", "1"]
    done = _launch(tmp_path, "-np", "3", "--to", "openmpi", "--", "sh", "-c", rank, "sh", *own)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "bad").read_text() == "h0\nh1\nh2\n", done.stderr
    assert "MPI, of tensors on CPUs" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith(" BAD")]
    assert [row[0] for row in rows] == ["h0", "h1", "h2"] and all(float(row[5]) > 0 for row in rows)


HANGS = """
import os, signal, sys, time
from types import SimpleNamespace
from hvdtrain.comm import link_probe
from hvdtrain.doctor import preflight
from hvdtrain.__main__ import main

# The deadline of rank 0 comes when rank 1 has stopped; rank 0 then listens until rank 2 has reported again.
rank = os.environ["OMPI_COMM_WORLD_RANK"]
preflight.time = SimpleNamespace(monotonic=lambda: 1e9 if rank == "0" and os.path.exists("stopped") else 0.0)
measure, reports, before = link_probe.measure_hosts, preflight._reports, []

def stop(*words):
    if rank == "1":
        preflight.Deadline._report = lambda *_: None
        open("stopped", "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return measure(*words)

def listen(store, size):
    while 2 not in (found := reports(store, size)) or (before and found[2] == before[0][2]):
        time.sleep(0.1)
    before.append(found)
    return found

link_probe.measure_hosts, preflight._reports = stop, listen
os.environ["SLURMD_NODENAME"] = "h" + rank
sys.exit(main(["preflight", "--timeout", "25", "--write", "bad"]))
"""


@pytest.mark.slow
def test_a_host_that_hangs_is_named(tmp_path: Path) -> None:
    """Its rank stops as soon as it is connected."""
    program("mpirun")
    done = _launch(tmp_path, "-np", "3", "--to", "openmpi", "--", "python", "-c", HANGS)
    assert done.returncode == 3, done.stderr
    assert "did not answer within 25 s: h1" in done.stderr
    assert "preflight: rank 0 waits for " in done.stderr
    assert (tmp_path / "bad").read_text() == "h1\n"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("pipe", "missing/bad", "."):
        with pytest.raises(ConfigError, match=r"--write "):
            preflight_command._write(tmp_path / path, ())
    assert (tmp_path / "pipe").is_fifo()


def test_it_is_refused_before_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.comm.rounds.start_rounds", lambda *_, **__: pytest.fail("ranks meet"))
    options = preflight_command.parser().parse_args(["--write", str(tmp_path)])
    with pytest.raises(ConfigError, match="--write"):
        preflight_command._examine(options, RankInfo(), tmp_path / "log")
