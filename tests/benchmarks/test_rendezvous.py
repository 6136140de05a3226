"""The ranks of the simulation are Gloo's, and find each other by the stores of several hosts."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.store import Relay, packed, unpacked
from tests.support.launch import ROOT

HOSTS, LOCAL = 3, 4


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("rendezvous")
    del sys.modules["rendezvous"]


def test_all_ranks_of_all_hosts_read_all_addresses(simulation: Any) -> None:
    """Each value reaches each host once, however often it is read there."""
    hosts: list[Rendezvous] = []
    sent: list[str] = []
    log: list[str] = []
    lock = threading.Lock()  # in a driver one thread does it all

    def send(kind: str, *, round: int, keys: dict[str, str]) -> None:
        for host in hosts:
            host.open(round, {}) if kind == "open" else host.add(round, {k: unpacked(v) for k, v in keys.items()})
        sent.extend(keys)

    relay = Relay(send)

    def put(number: int, key: str, value: bytes) -> None:
        with lock:
            relay.put(number, key, packed(value))
            relay.flush()

    with ExitStack() as stack:
        for _ in range(HOSTS):
            hosts.append(Rendezvous(log.append, put=put))
            hosts[-1].start()
            stack.callback(hosts[-1].close)
        relay.open(simulation.ROUND, {})
        stores = [f"{host.address}/{simulation.ROUND}" for host in hosts]
        ranks = [simulation.Rank(n, HOSTS, LOCAL, stores[n // LOCAL]) for n in range(HOSTS * LOCAL)]
        assert len(simulation.run(ranks)) == len(ranks)
    assert not log and len(sent) == len(set(sent)) == 4 * HOSTS * LOCAL + 2 * HOSTS * LOCAL
