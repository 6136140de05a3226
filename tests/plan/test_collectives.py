"""What the ranks of a plan exchange, compared with what engines do for the same gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hvdtrain.compression.coding_probe import answer
from hvdtrain.compression.table import TABLE, parse
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from hvdtrain.plan.collectives import buckets
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
    compression = parse(name)
    found = buckets(Plan(bucket_mib=limit_bytes / (1 << 20)), gradients, Ranks(ranks, ranks), compression)
    assert [list(b.names) for b in found] == [[part.name for part in layout.shape.parts] for layout in layouts]
    for bucket, layout in zip(found, layouts, strict=True):
        assert list(bucket.starts) == [part.start for part in layout.shape.parts]
        assert bucket.shape.length == layout.shape.length
        handed: dict[str, float] = {}
        for kind, size in bucket.collectives(compression, ranks):
            handed[kind] = handed.get(kind, 0.0) + size
        assert handed == pytest.approx(compression.payload(layout.shape.sizes, ranks))


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
