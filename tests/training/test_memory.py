"""Each kind of memory is counted once."""

from __future__ import annotations

import torch

from hvdtrain.engine.make import make_engine
from hvdtrain.spans import Spans
from hvdtrain.training.records.memory import memory_by_kind
from tests.support.thread_comm import ThreadComm, on_ranks

_MIB = 1 << 20
_CPU = torch.device("cpu")


def _held(comm: ThreadComm) -> dict[str, float]:
    model = torch.nn.Linear(512, 512 * 4, bias=False)  # 4 MiB
    model.register_buffer("mask", torch.zeros(_MIB, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = make_engine(optimizer, model, comm, "none", Spans())
    engine.begin(1)
    engine.backward(model(torch.ones(1, 512)).sum())
    engine.finish()
    engine.step()
    found = memory_by_kind(_CPU, model, engine)
    assert found["where"] == "host"
    mib: dict[str, float] = found["mib"]
    return mib


def test_each_kind_of_memory_is_counted_once() -> None:
    for mib in on_ranks(2, _held):
        known = {name: value for name, value in mib.items() if "rest" not in name}
        assert known == {
            "parameters": 4.0,
            "buffers": 1.0,
            "exchange": 4.0,
            "gradients": 0.0,  # views of the buckets
            "optimizer": 8.0,
        }
    (alone,) = on_ranks(1, _held)
    assert (alone["exchange"], alone["gradients"]) == (0.0, 4.0)
