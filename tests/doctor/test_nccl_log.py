"""Reading NCCL's log: lines as NCCL 2.4 to 2.29 write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import doctor
from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.nccl_log import NcclLog
from hvdtrain.runtime.environment import RankInfo
from tests.doctor.facts import WELL, changed

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
COPIES = """
a:10:12 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1.
a:10:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct
a:10:12 [0] NCCL INFO Channel 01 : 0[1a000] -> 1[1c000] via direct shared memory
"""
IB_OFF = INFINIBAND + "a:1:2 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n" + SOCKET.replace("docker", "e")
P2P_OFF = "a:1:2 [0] NCCL INFO P2P is disabled between connected GPUs 0 and 1. You can repress this message"
NO_SHM = "a:1:2 [0] misc/shmutils.cc:63 NCCL WARN Error while creating shared memory segment nccl-x (size 9637888)"


def read(text: str) -> NcclLog:
    return NcclLog(text.splitlines(), "nccl.log")


def judged(text: str) -> dict[str, tuple[str, str, str]]:
    own = [one for one in examine(changed(nccl_log=read(text))) if one.name.startswith("nccl_")]
    return {one.name: (one.level, f"{one.found} {one.why}", one.fix) for one in own}


def test_every_part_of_a_log_is_read() -> None:
    log = read(HEAD + INFINIBAND)
    assert log.versions == ["2.29.2"]
    assert (list(log.hosts), *log.size) == (["a"], 4, 2)
    assert log.interfaces == ["eth0", "eth1"]
    assert log.channels() == {"NET/IB": 2, "P2P": 1}
    assert log.channels("GDRDMA") == {"NET/IB": 2}
    assert not log.warnings and "p2p_off" not in log.facts
    assert read(SOCKET).interfaces == ["eth0", "docker0"]
    assert read(COPIES).is_set("NCCL_P2P_DISABLE") and not read(COPIES).is_set("NCCL_IB_DISABLE")
    libfabric = read("x NCCL INFO Channel 0 : 0[0] -> 1[0] via NET/AWS Libfabric/0/GDRDMA")
    assert libfabric.channels() == {"NET/AWS Libfabric": 1}


def test_all_is_well_on_infiniband() -> None:
    found = judged(HEAD + INFINIBAND)
    levels = {name: level for name, (level, _, _) in found.items()}
    assert levels == dict.fromkeys(("nccl_log", "nccl_network", "nccl_gpudirect"), "ok")
    assert "4 ranks" in found["nccl_log"][1]


def test_what_a_log_does_not_tell_is_not_reported() -> None:
    assert "nccl_gpudirect" not in judged(SOCKET), "TCP has none"
    assert not [one for one in examine(WELL) if one.name.startswith("nccl_")], "there is no log"


@pytest.mark.parametrize(
    ("text", "name", "level", "said", "fix"),
    [
        ("nothing of interest", "nccl_log", "warning", "nccl.log", "NCCL_DEBUG=INFO"),
        (HEAD + "NCCL version 2.18.3+cuda12.1", "nccl_version", "broken", "2.29.2, 2.18.3", "same torch"),
        (HEAD + SOCKET.replace("docker0", "eth9"), "nccl_network", "warning", "found no InfiniBand", "/dev/infiniband"),
        (HEAD + SOCKET, "nccl_network", "broken", "docker0 leads to no other host", "NCCL_SOCKET_IFNAME=^lo"),
        (IB_OFF, "nccl_network", "warning", "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"),
        (HEAD + INFINIBAND.replace("(1)/GDRDMA", "(1)"), "nccl_gpudirect", "warning", "1 of 2", "nvidia_peermem"),
        (HEAD + COPIES, "nccl_peers", "warning", "NCCL_P2P_DISABLE is set", "unset NCCL_P2P_DISABLE"),
        (COPIES.replace("to 1", "to 0"), "nccl_peers", "warning", "1 connections through shared", "nvidia-smi topo"),
        (P2P_OFF, "nccl_peers", "warning", "that it may not use", "ACS"),
        (NO_SHM, "nccl_warnings", "broken", "9637888", "--shm-size"),
        ("a:1:2 [0] NCCL WARN Call to connect returned Connection refused", "nccl_warnings", "broken", "", "IFNAME"),
        ("a:1:2 [0] NCCL WARN Call to ibv_reg_mr failed", "nccl_warnings", "broken", "ibv_reg_mr", "ulimit -l"),
        ("a:1:2 [1] NCCL WARN Duplicate GPU detected : rank 0", "nccl_warnings", "broken", "", "than it has GPUs"),
        ("a:1:2 [1] NCCL WARN Message truncated : received 1024 bytes", "nccl_warnings", "broken", "", "same torch"),
        ("a:1:2 [1] NCCL WARN nobody knows this one", "nccl_warnings", "broken", "nobody knows", "first warning"),
    ],
)
def test_what_is_wrong_is_named(text: str, name: str, level: str, said: str, fix: str) -> None:
    found = judged(text)
    assert found[name][0] == level
    assert said in found[name][1] and fix in found[name][2]


def test_a_log_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--nccl_log", str(tmp_path / "none.log")]) == 2
    assert "NCCL_DEBUG=INFO" in capsys.readouterr().out


def test_the_log_reaches_the_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.log").write_text(HEAD + INFINIBAND)
    got: list[Any] = []
    monkeypatch.setattr(doctor, "prepare", lambda: (RankInfo(), []))
    monkeypatch.setattr(doctor, "gather", lambda *facts: got.extend(facts))
    monkeypatch.setattr(doctor, "examine", lambda facts: [])
    assert doctor.main(["--nccl_log", str(tmp_path / "nccl.log")]) == 0
    (log,) = [each for each in got if isinstance(each, NcclLog)]
    assert log.facts == read(HEAD + INFINIBAND).facts and log.name == str(tmp_path / "nccl.log")
