"""Each kind of memory is counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.engine.make import make_engine
from hvdtrain.spans import Spans
from hvdtrain.training.records.memory import failing_module, largest_parameters, memory_by_kind
from tests.support.thread_comm import ThreadComm, on_ranks

_MIB = 1 << 20
_CPU = torch.device("cpu")


def _held(comm: ThreadComm) -> dict[str, float]:
    model = nn.Linear(512, 512 * 4, bias=False)  # 4 MiB
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


class _Greedy(nn.Module):
    """Runs out of memory in its second forward pass."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * x


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_module_that_asked_for_more_is_named(recomputed: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), _Greedy()))
    given = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError) as failed:
        if recomputed:
            checkpoint(model, given, use_reentrant=False).sum().backward()
        model(model(given))
    assert failing_module(failed.value, model) == "1.1"
    assert failing_module(ValueError("not raised"), model) == ""


def test_the_largest_parameters_are_named() -> None:
    model = nn.Sequential(*(nn.Linear(1, size << 18, bias=False) for size in (1, 4, 2, 3)))
    assert list(largest_parameters(model).items()) == [("1.weight", 4.0), ("3.weight", 3.0), ("2.weight", 2.0)]
