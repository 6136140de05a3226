"""What the ranks of a plan exchange, compared with what engines do for the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.comm.imagined import ImaginedComm
from hvdtrain.compression.coding_probe import answer
from hvdtrain.compression.table import TABLE, parse
from hvdtrain.engine.make import make_engine
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.plan.collectives import buckets, collectives
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import Plan, Ranks

SHAPES = st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=3), st.booleans()), min_size=1, max_size=12)


@given(SHAPES, st.integers(1, 4000), st.sampled_from(sorted(TABLE)), st.integers(1, 5))
def test_buckets_and_bytes_are_those_of_the_exchange(
    shapes: list[tuple[list[int], bool]], limit_bytes: int, name: str, ranks: int
) -> None:
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, (shape, _) in enumerate(shapes)]
    finished = [name for (name, _), (_, ready) in zip(named, shapes, strict=True) if ready]
    layouts = lay_out(assign_buckets(named, limit_bytes, finished), dict(named), "g")
    times = {n: float(place) for place, n in enumerate(finished)}
    gradients = [Gradient(n, tuple(p.shape), ready_s=times.get(n)) for n, p in named]
    found = buckets(Plan(bucket_mib=limit_bytes / (1 << 20)), gradients, Ranks(ranks, ranks), parse(name))
    assert [(b.names, b.starts, b.shape.length) for b in found] == [
        ([part.name for part in layout.shape.parts], [part.start for part in layout.shape.parts], layout.shape.length)
        for layout in layouts
    ]


class Counting(ImaginedComm):
    """Adds up the bytes that a rank hands over, by kind."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.handed: dict[str, int] = {}
        for kind in ("allreduce", "allgather", "alltoall", "reducescatter"):
            setattr(self, kind, partial(self._count, kind, getattr(self, kind)))

    def _count(self, kind: str, call: Callable[..., Any], tensor: torch.Tensor, **named: Any) -> Any:
        self.handed[kind] = self.handed.get(kind, 0) + tensor.nbytes
        return call(tensor, **named)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8"])
def test_engines_hand_over_what_a_plan_says(shard: str, compression: str) -> None:
    """Segments of owners are equally long, and some have gaps."""
    model = nn.Sequential(nn.Linear(600, 1024), nn.Linear(1024, 600))
    plan, comm = Plan(shard=shard, compression=compression, bucket_mib=2.0), Counting(2)
    engine = make_engine(torch.optim.SGD(model.parameters()), model, comm, plan)
    for _ in range(2):  # the first step learns the buckets
        comm.handed.clear()
        engine.begin(2)
        engine.accumulate(lambda: partial(engine.backward, model(torch.ones(1, 600)).sum()) for _ in range(2))
        engine.finish()
        engine.step()
        engine.complete()
    gradients = [Gradient(name, tuple(p.shape)) for name, p in model.named_parameters()]
    expected: dict[str, float] = {}
    for each in collectives(plan, gradients, Ranks(2, 2), passes=2):
        expected[each.kind] = expected.get(each.kind, 0.0) + each.times * each.nbytes
    assert comm.handed == pytest.approx(expected, rel=1e-3 if shard == "none" else 0.05)


def test_a_gradient_of_few_rows_travels_as_these_until_there_are_too_many() -> None:
    embedding = Gradient("e", (8192, 320), ready_s=1.0, rows=100)
    (rows,) = buckets(Plan(), [embedding], Ranks(2, 2), parse("none"))
    assert rows.collectives(parse("none"), 2) == [("allgather", 400.0), ("allreduce", 4.0 * 200 * 320)]
    assert rows.collectives(parse("fp16"), 2)[1] == ("allreduce", 2.0 * 200 * 320)
    (all_of_it,) = buckets(Plan(), [embedding], Ranks(64, 64), parse("none"))
    assert [each.rows for each in (rows, all_of_it)] == [200, 0]


@pytest.mark.parametrize("name", sorted(TABLE))
def test_as_many_collectives_are_predicted_as_there_are(name: str) -> None:
    """In a probe, which drives the real compressor."""
    compression = parse(name)
    gradients = [Gradient("m", (64, 64), ready_s=1.0), Gradient("v", (10,), ready_s=2.0)]
    (bucket,) = buckets(Plan(), gradients[::-1], Ranks(3, 3), compression)
    parts = list(zip(bucket.names, map(list, bucket.shape.shapes), bucket.starts, strict=True))
    asked = {"parts": parts, "length": bucket.shape.length, "dtype": "float32"}
    (cost,) = answer({"compression": name, "ranks": 3, "buckets": [asked]})
    guess = compression.estimate_coding(bucket.shape, [g.nbytes for g in gradients], 3, 1e-10)
    ways = len(bucket.collectives(compression, 3))
    assert len(cost.before_s) == len(cost.during_s) == len(guess.before_s) == len(guess.during_s) == ways
    assert len(cost.pack_s) == len(guess.pack_s) == 2
    assert all(seconds >= 0 for seconds in (*cost.pack_s, *cost.before_s, *cost.during_s, cost.after_s, cost.commit_s))
    assert cost.scaled(2).total_s == pytest.approx(2 * cost.total_s)
