"""Ranks that ask as Gloo does find each other by the stores of several hosts."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hvdtrain.launch import request
from hvdtrain.launch.node_store import ROUND, Batches, NodeStore, find_node_store
from hvdtrain.launch.rendezvous import Rendezvous
from tests.support.launch import ROOT

HOSTS, LOCAL = 3, 4


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("rendezvous")
    del sys.modules["rendezvous"]


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
            ranks = [simulation.Rank(n, HOSTS, LOCAL, stores[n // LOCAL]) for n in range(HOSTS * LOCAL)]
            assert len(simulation.run(ranks)) == len(ranks)
        finally:
            over.set()
        for node in nodes:
            node.result()
    main.close()
    assert not log
