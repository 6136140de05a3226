"""What the ranks of a plan exchange, compared with what engines do for the same gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hvdtrain.comm.solo import ImaginedComm
from hvdtrain.compression.coding_probe import answer
from hvdtrain.compression.table import TABLE, parse
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.engine.make import make_engine
from hvdtrain.plan.collectives import buckets, collectives, share_in_order
from hvdtrain.plan.gradients import Gradient, finished
from hvdtrain.plan.plan import BITS, Plan, Ranks


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8", BITS])
def test_engines_hand_over_what_a_plan_says(shard: str, compression: str) -> None:
    """Backward skips a parameter. Segments of owners are equally long, and some have gaps."""
    model = nn.Sequential(nn.Linear(600, 1024), nn.Linear(1024, 600))
    model.register_parameter("skipped", nn.Parameter(torch.zeros(700)))
    is_bits = compression == BITS
    compression = "none" if is_bits else compression
    plan = Plan(shard=shard, compression=compression, bucket_mib=3.0, bits=is_bits, micro_batches=4)
    comm = ImaginedComm(2)
    engine = make_engine(torch.optim.SGD(model.parameters()), model, comm, plan)
    for _ in range(2):  # the first step learns the buckets
        comm.traffic.sent = 0
        engine.begin(2)
        engine.accumulate(lambda: partial(engine.backward, model(torch.ones(1, 600)).sum()) for _ in range(2))
        engine.finish()
        engine.step()
        engine.complete()
    named = [(name, tuple(p.shape), name != "skipped") for name, p in model.named_parameters()]
    gradients = [Gradient(name, shape, ready_s=-i if ready else None) for i, (name, shape, ready) in enumerate(named)]
    sent = {"allreduce": 2, "allgather": 2, "alltoall": 1, "reducescatter": 1}
    expected = sum(each.times * sent[each.kind] * each.nbytes for each in collectives(plan, gradients, Ranks(2, 2), 2))
    assert comm.traffic.sent == pytest.approx(expected, rel=1e-3 if shard == "none" else 0.05)
    if isinstance(engine.sums, InAllCopies):
        found = [[part.name for part in layout.shape.parts] for layout in engine.sums.reducer.layouts()]
        assert found == [bucket.names for bucket in buckets(plan, gradients, Ranks(2, 2), parse(compression))]
        assert found[-1] == ["skipped"] and len(found) == 3


def test_a_gradient_of_few_rows_travels_as_these_until_there_are_too_many() -> None:
    embedding = Gradient("e", (8192, 320), ready_s=1.0, rows=100)
    (rows,) = buckets(Plan(), [embedding], Ranks(2, 2), parse("none"))
    assert rows.collectives(parse("none"), 2) == [("allgather", 400.0), ("allreduce", 4.0 * 200 * 320)]
    assert rows.collectives(parse("fp16"), 2)[1] == ("allreduce", 2.0 * 200 * 320)
    (all_of_it,) = buckets(Plan(), [embedding], Ranks(64, 64), parse("none"))
    assert [each.rows for each in (rows, all_of_it)] == [200, 0]


@pytest.mark.parametrize(
    ("ranks", "shard", "share"),
    [(1, "none", 1.0), (2, "none", 1.0), (16, "optimizer", 1.0), (3, "none", 2.0), (3, "gradients", 1.0)],
)
def test_sums_in_one_order_send_more_where_ranks_do_not_divide_the_tree(ranks: int, shard: str, share: float) -> None:
    """16 micro-batches; on 3 ranks the middle one, with 5, sends 3 sums."""
    assert share_in_order(Plan(shard=shard, bits=True, micro_batches=16), ranks) == share


def test_what_backward_skips_comes_last() -> None:
    given = [Gradient("a", (1,)), Gradient("b", (1,), ready_s=1.0), Gradient("c", (1,))]
    assert [gradient.name for gradient in finished(given)] == ["b", "c", "a"]


def test_groups_compress_only_what_they_exchange_with_each_other() -> None:
    plan = Plan("fsdp", shard="parameters", dp_shard=2, compression="fp16")
    found = collectives(plan, [Gradient("layers.0.w", (64, 64), ready_s=1.0)], Ranks(4, 2), passes=3)
    sent = {"reducescatter": (4 * 64 * 64, 3), "allgather": (4 * 32 * 64, 6), "allreduce": (2 * 32 * 64, 1)}
    assert {each.kind: (each.nbytes, each.times) for each in found} == sent and {each.ranks for each in found} == {2}


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
