"""The size of buckets and the priority of threads follow from the hosts of the ranks and from the compression."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import parse
from hvdtrain.config.sync import OuterPlan
from hvdtrain.engine.base import Engine
from hvdtrain.engine.one_rank import OneRank
from hvdtrain.engine.periodic import make_periodic
from hvdtrain.exchange import buckets
from hvdtrain.exchange.buckets import prepare_exchange, resolve_compression
from tests.support.thread_comm import Hub, ThreadComm

MIB = 1 << 20


@pytest.mark.parametrize(
    ("compression", "per_host", "mib", "gives_way"),
    [
        ("none", 2, 32, False),
        ("none", 1, 8, True),
        ("fp16", 2, 32, False),
        ("fp16", 1, 2, True),
        ("int8", 1, 8, True),
        ("powersgd:4", 1, 8, False),
        ("topk", 1, 8, False),
    ],
)
def test_buckets_and_priority(
    compression: str, per_host: int, mib: int, gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(buckets, "lower_own_priority", asked.append)
    comm = ThreadComm(Hub(2), 0)
    comm.local_size = per_host
    variables = {buckets.NICE: "7"}
    assert prepare_exchange(parse(compression), comm, variables) == mib * MIB
    assert prepare_exchange(parse(compression), comm, variables, bucket_mib=0.5) == MIB / 2
    assert asked == ["7", "7"] * gives_way, "whatever their size"


@pytest.mark.parametrize(
    ("environ", "device", "halves"),
    [
        ({"HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "gloo"}, "cpu", False),
        ({"HOROVOD_RANK": "0", "HOROVOD_CPU_OPERATIONS": "gloo"}, "cuda", True),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "cpu", True),
        ({"HVDTRAIN_CHANNEL": "3"}, "cpu", False),
    ],
)
def test_gloo_on_cpus_sums_no_halves(environ: dict[str, str], device: str, halves: bool) -> None:
    for name in ("fp16", "topk:0.1"):
        found = resolve_compression(name, torch.device(device), environ)
        assert found.halves == halves and str(found) == name
        assert found.exact_rows == (not halves)
    payload = resolve_compression("fp16", torch.device(device), environ).payload(Bucket([(640,)], "float32", 640), 2)
    assert ("allreduce" in payload) == halves


class _Horovod(SoloComm):
    """Horovod's threads are one that sleeps."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self.started_threads = frozenset([thread])

    def start_timeline(self, path: Path) -> None:
        pass

    def stop_timeline(self) -> None:
        pass


@pytest.mark.parametrize(("delay", "nice"), [(4, 19), (0, None)])
def test_threads_that_exchange_during_steps_give_way_to_them(delay: int, nice: int | None) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    assert thread.native_id is not None
    before = os.getpriority(os.PRIO_PROCESS, thread.native_id)
    try:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = OuterPlan(workers=2, every=8, delay=delay)
        local = Engine(optimizer, OneRank(lambda: list(model.named_parameters())))
        engine = make_periodic(model, plan, _Horovod(thread.native_id), lambda *_: local, "none", elastic=False)
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == before
        engine.begin_workers(0)
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == (before if nice is None else nice)
    finally:
        over.set()


def test_closing_an_engine_ends_its_schedule_and_its_sums() -> None:
    model, closed = nn.Linear(1, 1), list[str]()
    engine = Engine(torch.optim.SGD(model.parameters()), OneRank(lambda: []))
    engine.schedule.close = partial(closed.append, "schedule")  # type: ignore[method-assign]
    engine.sums.close = partial(closed.append, "sums")  # type: ignore[method-assign]
    engine.close()
    assert closed == ["schedule", "sums"]
