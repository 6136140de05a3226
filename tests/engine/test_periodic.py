"""What the engine of workers that train apart does beside exchanging: priorities of threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import SoloComm
from hvdtrain.config.sync import OuterPlan
from hvdtrain.engine.local import LocalEngine
from hvdtrain.engine.periodic import make_periodic


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
        engine = make_periodic(
            model,
            plan,
            _Horovod(thread.native_id),
            lambda comm, compression: LocalEngine(list(model.named_parameters()), optimizer),
            "none",
            elastic=False,
        )
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == before
        engine.begin_workers(0)
        assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == (before if nice is None else nice)
    finally:
        over.set()
