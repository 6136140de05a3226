"""The same attacks on the store of `hvdtrain launch`, while a job of two ranks runs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.audited import audited, seen
from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S
from tests.support.payload import MakesFolder, encoded, request

SUPPORT = ROOT / "tests" / "support"
STOCK_PATHS = ["/worker_addresses/localhost:0", "/runfunc/func", "/global/0"]


class Job(NamedTuple):
    """What was done to a job's driver and seen of it while it ran, and the folder it worked in, at its end."""

    folder: Path
    port: int
    answers: dict[str, set[int]]
    listening: list[tuple[str, int]]
    shows_secret: bool


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    found = process.net_connections("inet")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == "LISTEN"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    attack = encoded(MakesFolder(folder / "was here"))
    with subprocess.Popen(
        [sys.executable, SUPPORT / "fake_launch.py", SUPPORT / "visiting_rank.py", "-np", "2", "--", "store"],
        cwd=folder,
        env={**ENVIRONMENT, **audited(folder / "audit")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            store = next(line for line in process.stdout if "STORE" in line).split()[-1]
            address, token, number = store.split("/")
            port = int(address.split(":")[1])
            prefixes = {"none": "", "wrong": f"/{'A' * len(token)}/{number}:0", "right": f"/{token}/{number}:0"}
            answers = {
                name: {request("PUT", port, f"{prefix}{path}", attack) for path in STOCK_PATHS}
                for name, prefix in prefixes.items()
            }
            answers["read"] = {request("GET", port, f"{prefixes['right']}{path}") for path in STOCK_PATHS}
            driver = psutil.Process(process.pid)
            processes = [driver, *driver.children(recursive=True)]
            assert len(processes) >= 4  # the driver, the agent of the host, two ranks
            listening = [where for one in processes for where in _listening(one)]
            shown = " ".join(word for one in processes for word in [*one.cmdline(), *one.environ().values()])
            for host in _other_addresses():
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((host, port), timeout=TIMEOUT_S)
            (folder / "go").touch()
            assert process.wait(TIMEOUT_S) == 0
        finally:
            process.kill()
    return Job(folder, port, answers, listening, token in shown)


def _other_addresses() -> list[str]:
    every = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    return [one.address for one in every if one.family.name == "AF_INET" and not one.address.startswith("127.")]


def test_values_that_stock_horovod_unpickles_are_refused_or_kept_as_bytes(job: Job) -> None:
    assert job.answers == {"none": {404}, "wrong": {403}, "right": {200}, "read": {200}}
    assert not (job.folder / "was here").exists()
    assert seen(job.folder / "audit", "pickle.find_class") == []


def test_all_that_listens_does_so_on_the_loopback_alone(job: Job) -> None:
    assert job.listening == [("127.0.0.1", job.port)]
    assert {line["what"][0] for line in seen(job.folder / "audit", "socket.bind")} == {"127.0.0.1"}


def test_the_job_starts_no_shell_and_shows_no_secret(job: Job) -> None:
    """On the command line, or in the environment at the start, which ps shows to others of the user or to all."""
    assert not job.shows_secret
    for event in ("os.system", "subprocess.Popen"):
        assert seen(job.folder / "audit", event) == []
