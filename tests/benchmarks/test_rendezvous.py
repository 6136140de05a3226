"""The ranks of the simulation are Gloo's, and find each other by the stores of several hosts."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from hvdtrain.launch import request
from hvdtrain.launch.node_store import ROUND, Batches, NodeStore, find_node_store
from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.rendezvous_store import Relay, packed, unpacked
from tests.support.launch import ROOT

HOSTS, LOCAL = 3, 4


def meet(simulation: Any, stores: list[str]) -> None:
    ranks = [simulation.Rank(n, HOSTS, LOCAL, stores[n // LOCAL]) for n in range(HOSTS * LOCAL)]
    assert len(simulation.run(ranks)) == len(ranks)


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
        meet(simulation, [f"{host.address}/{simulation.ROUND}" for host in hosts])
    assert not log and len(sent) == len(set(sent)) == 4 * HOSTS * LOCAL + 2 * HOSTS * LOCAL


@pytest.mark.parametrize("without", [None, 1])
def test_all_ranks_of_an_srun_do_so_by_the_copies_of_its_store(
    simulation: Any, without: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node may have none: its ranks ask the store itself."""
    monkeypatch.setattr(request, "_POLL_S", 0.05)
    log: list[str] = []
    over = threading.Event()

    def put(number: int, key: str, value: bytes) -> None:
        batches.put(key, value)

    main = Rendezvous(log.append, put=put)
    batches = Batches(main.add)
    threading.Thread(target=batches.run, daemon=True).start()
    main.start()
    main.open(ROUND, {})
    store = f"{main.address}/{ROUND}"
    with ThreadPoolExecutor() as threads:
        nodes = [
            threads.submit(NodeStore(store, str(node)).run, lambda: not over.is_set())
            for node in range(HOSTS)
            if node != without
        ]
        try:
            stores = [store if node == without else find_node_store(store, str(node)) for node in range(HOSTS)]
            assert len({*stores, store}) == HOSTS + (without is None)
            meet(simulation, stores)
        finally:
            over.set()
        for node in nodes:
            node.result()
    main.close()
    assert not log
