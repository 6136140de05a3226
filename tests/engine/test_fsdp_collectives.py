"""FSDP's collectives by our communicator, as FSDP calls them: what they write, when, and under which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hvdtrain.compression.table import parse
from hvdtrain.engine.fsdp_collectives import FsdpCollectives
from hvdtrain.spans import GATHER, Spans
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

LENGTH = 300
"""Elements of a shard: one block of int8, and a part of another."""
TOLERANCES = {"none": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 0.02}


def _make(comm: ThreadComm, compression: str = "none", spans: Spans | None = None, **options: bool) -> FsdpCollectives:
    made = FsdpCollectives(comm, parse(compression).load_coding(torch.device("cpu")), spans or Spans(), **options)
    made.begin()
    made.begin_pass()
    return made


def _values(seed: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compression", TOLERANCES)
def test_all_ranks_gather_equal_parameters(compression: str, dtype: torch.dtype) -> None:
    whole = torch.cat([_values(rank, LENGTH, dtype) for rank in range(3)])

    def body(comm: ThreadComm) -> Tensor:
        out = torch.full((3 * LENGTH,), float("nan"), dtype=dtype)
        own = out[comm.rank * LENGTH : (comm.rank + 1) * LENGTH]  # as FSDP gives it
        own.copy_(_values(comm.rank, LENGTH, dtype))
        work = _make(comm, compression).gather("parameters/a", own, out, comm)
        assert list(comm.in_flight) == ["parameters/a"]
        assert work.wait() and work.wait() and not comm.in_flight
        return out

    found = on_ranks(3, body)
    assert all(torch.equal(out, found[0]) for out in found), "the owner computes with what it sent"
    torch.testing.assert_close(found[0].double(), whole.double(), rtol=0, atol=TOLERANCES[compression])


@per_rank(2)
def test_parameters_of_several_dtypes_are_gathered_as_bytes(comm: ThreadComm) -> None:
    out = torch.zeros(20, dtype=torch.uint8)
    _make(comm, "int8").gather("parameters/a", torch.arange(10, dtype=torch.uint8) + comm.rank, out, comm).wait()
    assert out.tolist() == [*range(10), *range(1, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compression", TOLERANCES)
@per_rank(3)
def test_owners_get_the_sums_of_their_shards(comm: ThreadComm, compression: str, dtype: torch.dtype) -> None:
    total = sum((_values(rank, 3 * LENGTH, dtype).double() for rank in range(3)), torch.zeros(3 * LENGTH).double())
    made, out = _make(comm, compression), torch.full((LENGTH,), float("nan"), dtype=dtype)
    made.sum("a", _values(comm.rank, 3 * LENGTH, dtype), out, comm)
    assert out.isnan().all() and list(comm.in_flight) == ["gradients/a"]
    made.finish_pass()
    assert made.has_summed(out[7:9]) and not made.has_summed(out.clone()) and not comm.in_flight
    atol = 3 * TOLERANCES[compression] + (2.0**-6 if dtype == torch.bfloat16 else 1e-6)
    expected = total[comm.rank * LENGTH : (comm.rank + 1) * LENGTH]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("copied", [False, True])
@per_rank(2)
def test_few_sums_are_under_way_and_a_second_one_of_a_module_is_waited_for(comm: ThreadComm, copied: bool) -> None:
    """None is, where torch copies each to the host at once."""
    made = _make(comm, copied=copied)
    outs = [torch.zeros(LENGTH) for _ in range(6)]
    for number, out in enumerate(outs[:5]):
        made.sum(f"{number}", _values(number, 2 * LENGTH), out, comm)
        assert len(comm.in_flight) <= 2 * (not copied)
    made.sum("4", _values(5, 2 * LENGTH), outs[5], comm)
    assert not comm.in_flight
    for number, out in enumerate(outs):
        assert torch.equal(out, 2 * _values(number, 2 * LENGTH).view(2, -1)[comm.rank])
    made.begin_pass()
    assert made.has_summed(outs[0]) == copied


@per_rank(2)
def test_waits_for_parameters_are_recorded_in_a_step_only(comm: ThreadComm) -> None:
    spans = Spans()
    made = _make(comm, spans=spans)
    gather: Any = lambda: made.gather("parameters/a", torch.zeros(1), torch.zeros(2), comm).wait()  # noqa: E731
    gather()
    made.finish()
    gather()
    assert [event.name for event in spans.events()] == [GATHER]
