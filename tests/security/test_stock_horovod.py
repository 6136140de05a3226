"""Attacks on stock Horovod's servers succeed, which shows that the tests of ours can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S
from tests.support.payload import GivesFunction, MakesFolder, encoded, request

pytest.importorskip("horovod", reason="Horovod is not installed: make setup")


@contextmanager
def stock_servers() -> Iterator[tuple[int, int]]:
    """Serve; the ports of the elastic rendezvous and of functions, which are those of every interface."""
    server, pipe = [sys.executable, "-m", "tests.support.stock_servers"], subprocess.PIPE
    with subprocess.Popen(server, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        elastic, functions = map(int, process.stdout.readline().split())
        found = psutil.Process(process.pid).net_connections("inet")
        listening = {one.laddr.port: one.laddr.ip for one in found if one.status == "LISTEN"}
        assert listening[elastic] == listening[functions] == "0.0.0.0"
        yield elastic, functions
        process.stdin.close()


def test_values_that_anyone_puts_run_code_in_the_driver_and_in_a_rank(tmp_path: Path) -> None:
    """CVE-2024-10190 (as the user of the job) and CVE-2026-31234, here by horovod.run()'s rank."""
    in_driver, in_rank = tmp_path / "driver", tmp_path / "rank"
    with stock_servers() as (elastic, functions):
        request("PUT", elastic, "/worker_addresses/localhost:0", encoded(MakesFolder(in_driver)))
        assert in_driver.exists()
        assert request("PUT", functions, "/runfunc/func", encoded(GivesFunction(in_rank))) == 200
        assert not in_rank.exists()  # the server itself keeps it as it is
        done = subprocess.run(
            [sys.executable, "-m", "horovod.runner.run_task", "127.0.0.1", str(functions)],
            cwd=ROOT,
            env={**ENVIRONMENT, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert in_rank.exists() and done.returncode == 0, done.stderr
