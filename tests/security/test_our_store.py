"""The same attacks on the store of `hvdtrain launch`, while a job of two ranks runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.audited import audited, seen
from tests.support.fake_launch import FakeJob
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S
from tests.support.payload import MakesFolder, encoded, request

SUPPORT = ROOT / "tests" / "support"
STOCK_PATHS = ["/worker_addresses/localhost:0", "/runfunc/func", "/global/0"]


class Job(NamedTuple):
    """The driver, where its store is, and the folder it works in."""

    process: subprocess.Popen[str]
    port: int
    token: str
    round: str
    folder: Path

    def put(self, path: str, marker: Path) -> int:
        return request("PUT", self.port, path, encoded(MakesFolder(marker)))

    def end(self) -> None:
        (self.folder / "go").touch()
        assert self.process.wait(TIMEOUT_S) == 0


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with subprocess.Popen(
        [sys.executable, SUPPORT / "fake_launch.py", SUPPORT / "store_rank.py", "-np", "2", "--"],
        cwd=tmp_path,
        env={**ENVIRONMENT, **audited(tmp_path / "audit")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        store = next(line for line in process.stdout if "STORE" in line).split()[-1]
        address, token, number = store.split("/")
        yield Job(process, int(address.split(":")[1]), token, number, tmp_path)
        process.kill()


def test_values_that_stock_horovod_unpickles_are_refused_or_kept_as_bytes(job: Job, tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    assert [job.put(path, marker) for path in STOCK_PATHS] == [404] * 3
    wrong = "A" * len(job.token)
    assert [job.put(f"/{wrong}/{job.round}:0{path}", marker) for path in STOCK_PATHS] == [403] * 3
    assert [job.put(f"/{job.token}/{job.round}:0{path}", marker) for path in STOCK_PATHS] == [200] * 3
    assert [request("GET", job.port, f"/{job.token}/{job.round}:0{path}") for path in STOCK_PATHS] == [200] * 3
    job.end()
    assert not marker.exists()
    assert seen(tmp_path / "audit", "pickle.find_class") == []


def test_all_that_listens_does_so_on_the_loopback_alone(job: Job) -> None:
    driver = psutil.Process(job.process.pid)
    processes = [driver, *driver.children(recursive=True)]
    assert len(processes) >= 4  # the driver, the agent of the host, two ranks
    listening = [
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    ]
    assert listening == [("127.0.0.1", job.port)]
    job.end()


def test_no_other_address_of_the_host_reaches_it(job: Job) -> None:
    others = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family.name == "AF_INET" and not address.address.startswith("127.")
    }
    for host in others:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, job.port), timeout=TIMEOUT_S)
    job.end()


def test_the_job_starts_no_shell_and_shows_no_secret(job: Job, tmp_path: Path) -> None:
    """On the command line, or in the environment at the start, which ps shows to others of the user or to all."""
    driver = psutil.Process(job.process.pid)
    for process in [driver, *driver.children(recursive=True)]:
        assert job.token not in " ".join(process.cmdline())
        assert job.token not in " ".join(process.environ().values())
    job.end()
    for event in ("os.system", "subprocess.Popen"):
        assert seen(tmp_path / "audit", event) == []
    assert {line["what"][0] for line in seen(tmp_path / "audit", "socket.bind")} == {"127.0.0.1"}


@pytest.mark.slow
def test_ranks_start_and_recover_while_another_program_holds_all_the_connections_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reopens each closed connection; the output reports it with its user."""
    pytest.importorskip("horovod")
    monkeypatch.setenv("HVD_RANK_MARK", str(tmp_path / "mark"))
    options = ("-np", "2", "--elastic", "1:2", "--", "3", "kill:1:200")
    with FakeJob(tmp_path, *options, program=SUPPORT / "hvd_rank.py") as job:
        crowd = [sys.executable, SUPPORT / "crowd.py", str(job.pid), "1100"]
        with subprocess.Popen(crowd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            code, out = job.end()
            process.kill()
    assert code == 0, job.said
    assert "round 2: rank 0 of 1 at 200" in out and "round 3: rank 1 of 2" in out
    assert any("have sent no request" in line and f"of uid {os.getuid()}" in line for line in job.said)
