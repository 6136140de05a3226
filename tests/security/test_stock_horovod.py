"""Attacks on stock Horovod's servers succeed, which shows that the tests of ours can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.launch import ENVIRONMENT, ROOT, TIMEOUT_S
from tests.support.payload import GivesFunction, MakesFolder, encoded, request

pytest.importorskip("horovod", reason="Horovod is not installed: make setup")


class Stock(NamedTuple):
    """The process that serves, and its ports: of the elastic rendezvous, the plain one, and functions."""

    process: psutil.Process
    elastic: int
    plain: int
    functions: int


@contextmanager
def stock_servers() -> Iterator[Stock]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.stock_servers"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Stock(psutil.Process(process.pid), *map(int, process.stdout.readline().split()))
        process.stdin.close()


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    with stock_servers() as servers:
        yield servers


def test_a_put_of_a_worker_address_runs_code(stock: Stock, tmp_path: Path) -> None:
    """CVE-2024-10190: whoever reaches the elastic driver's port runs code as the user of the job."""
    marker = tmp_path / "was here"
    request("PUT", stock.elastic, "/worker_addresses/localhost:0", encoded(MakesFolder(marker)))
    assert marker.exists()


def test_a_value_read_from_the_store_runs_code(stock: Stock, tmp_path: Path) -> None:
    """CVE-2026-31234: a value that anyone has put is unpickled by the rank that reads it, here by horovod.run()'s."""
    marker = tmp_path / "was here"
    assert request("PUT", stock.functions, "/runfunc/func", encoded(GivesFunction(marker))) == 200
    assert not marker.exists()  # the server itself keeps it as it is
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.run_task", "127.0.0.1", str(stock.functions)],
        cwd=ROOT,
        env={**ENVIRONMENT, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert marker.exists() and done.returncode == 0, done.stderr


def test_the_plain_rendezvous_stores_values_of_anyone_but_runs_none(stock: Stock, tmp_path: Path) -> None:
    """What the warning says of `horovodrun --gloo` without elastic: addresses can be replaced, nothing is unpickled."""
    marker = tmp_path / "was here"
    assert request("PUT", stock.plain, "/global/0", encoded(MakesFolder(marker))) == 200
    assert request("GET", stock.plain, "/global/0") == 200
    assert not marker.exists()


def test_all_of_them_listen_on_every_interface(stock: Stock) -> None:
    listening = {c.laddr.port: c.laddr.ip for c in stock.process.net_connections("inet") if c.status == "LISTEN"}
    assert {listening[port] for port in stock[1:]} == {"0.0.0.0"}
