"""Predictions for other engines, and from their runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hvdtrain.compression.table import parse
from hvdtrain.engine.among_copies import AmongCopies
from hvdtrain.engine.blocks import blocks
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import ConfigError
from hvdtrain.plan.collectives import buckets, fill_ddp
from hvdtrain.plan.description import held
from hvdtrain.plan.gradients import Gradient, finished
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.timeline.whatif.engine_passes import _starts, update_s
from hvdtrain.timeline.whatif.evidence import Change, Evidence, changed_job
from hvdtrain.timeline.whatif.links import Link
from hvdtrain.timeline.whatif.predict import Outcome, predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.whatif_run import GBIT, MIB, PARTS, run_folder

SHAPES = {"embed.weight": (1024, 512), "layers.0.w": (1024, 512), "layers.1.w": (1024, 512), "head.weight": (512, 1024)}
"""2 MiB each; backward finishes the last one first, after 20, 40, 60 and 80 of 100 ms."""
DIVIDED = [{"shard": "optimizer"}, {"shard": "gradients"}, {"engine": "fsdp"}]
UPDATE_S = (PARTS["clip"] + PARTS["optimizer"]) / 1e3
FAST: dict[str, Any] = {"bandwidth_gbit": 1e9, "latency_us": 0}
SLOW: dict[str, Any] = {"bandwidth_gbit": 0.1, "latency_us": 0}


def _run(path: Path, **changes: Any) -> Evidence:
    given: dict[str, Any] = {"size": 2, "wait_ms": 9.0, "link": GBIT, "shapes": SHAPES, "state_bytes": (8, 4)}
    return read_evidence(run_folder(path, **{**given, **changes}))


def _then(evidence: Evidence, **change: Any) -> Outcome:
    return predict(evidence, Change(**change)).then


@pytest.fixture
def pair(tmp_path: Path) -> Evidence:
    """2 hosts of many cores, 1 rank each, without a divided optimizer."""
    return _run(tmp_path / "run")


@pytest.mark.parametrize("parallel", [{"shard": "optimizer"}, {"shard": "gradients"}, {"engine": "ddp"}])
@pytest.mark.parametrize("changes", [{}, {"passes": 3}, {"local_size": 2, "cores": 2}, {"link": ()}])
def test_unchanged_it_is_what_was_measured(tmp_path: Path, parallel: dict[str, str], changes: dict[str, Any]) -> None:
    evidence = _run(tmp_path / "run", options={"parallel": parallel}, gather_ms=3.0, **changes)
    assert predict(evidence, Change()).then.step_s == pytest.approx(evidence.step_s)


@pytest.mark.parametrize("change", DIVIDED)
def test_ranks_share_the_update(pair: Evidence, change: dict[str, str]) -> None:
    """Beside it there are only copies, of 8 MiB each: to buckets as before, and to and from those that are gathered."""
    now, then = _then(pair, **FAST), _then(pair, **FAST, **change)
    copies_s = then.compute_s - (now.compute_s - UPDATE_S / 2)
    assert 0 <= copies_s < 0.02
    more_ranks = _then(pair, size=4, global_batch=16, **FAST, **change)
    assert more_ranks.compute_s < then.compute_s + 0.01 - UPDATE_S / 4


def test_the_update_is_that_of_all_parameters_over_the_ranks_that_share_it(pair: Evidence, tmp_path: Path) -> None:
    """Of a divided run, the measured time of the optimizer is that of a half; its clipping stays."""
    clip_s, optimizer_s = PARTS["clip"] / 1e3, PARTS["optimizer"] / 1e3
    halves = _run(tmp_path / "half", options={"parallel": {"shard": "gradients"}})
    for evidence, expected in (
        (pair, [clip_s + optimizer_s, (clip_s + optimizer_s) / 2, (clip_s + optimizer_s) / 4]),
        (halves, [clip_s + 2 * optimizer_s, clip_s + optimizer_s, clip_s + optimizer_s / 2]),
    ):
        found = [
            update_s(evidence, changed_job(evidence, Change(size=size, shard=shard)), Link(0.0, 0.0))
            for size, shard in ((2, "none"), (2, "optimizer"), (4, "gradients"))
        ]
        assert found == pytest.approx(expected)


def test_the_halves_of_an_allreduce_carry_as_many_bytes(pair: Evidence) -> None:
    """FSDP gathers each block once more."""
    whole_s = _then(pair, algorithm="ring", **SLOW).wire_s
    found = [_then(pair, algorithm="ring", **SLOW, **change).wire_s / whole_s for change in DIVIDED]
    assert found == pytest.approx([1.0, 1.0, 1.25], rel=0.01)


@pytest.mark.parametrize("change", DIVIDED)
def test_a_slower_link_costs_no_less_and_computing_hides_gathers(pair: Evidence, change: dict[str, str]) -> None:
    """At 1 Gbit/s, 4 MiB of another rank take 36 ms to gather; forward takes 50, and backward 100."""
    found = [_then(pair, bandwidth_gbit=gbit, **change) for gbit in (100, 10, 1, 0.1, 0.01)]
    assert all(a.step_s <= b.step_s for a, b in pairwise(found))
    assert found[0].gather_s < 0.02 < found[-1].gather_s, "gathers are exposed"
    gathered_s = (1.75 if "engine" in change else 1) * 4 * MIB * 8 / 0.94e9
    assert found[2].gather_s < 0.75 * gathered_s


def test_gradients_are_exchanged_in_each_pass(tmp_path: Path) -> None:
    evidence = _run(tmp_path / "run", passes=3)
    fsdp = [_then(run, engine="fsdp", **SLOW).wire_s for run in (_run(tmp_path / "one"), evidence)]
    assert fsdp[1] == pytest.approx(3 * fsdp[0], rel=0.01)
    once, each = (_then(evidence, shard=shard, **SLOW) for shard in ("optimizer", "gradients"))
    assert each.wire_s == pytest.approx(2 * once.wire_s, rel=0.01), "three reduce-scatters instead of one, and a gather"
    gathered = 8 * MIB / 2
    assert each.handed_bytes - gathered == pytest.approx(3 * (once.handed_bytes - gathered), rel=0.01)


@pytest.mark.parametrize(
    ("change", "by_element", "name", "message"),
    [
        (Change(engine="ddp", shard="optimizer"), True, None, "engine ddp does not support --parallel.shard opt"),
        (Change(shard="parameters"), True, None, "only FSDP divides parameters"),
        (Change(shard="gradients", size=1), True, None, "one rank"),
        (Change(shard="gradients", compression="int8"), True, None, "with compression int8"),
        (Change(engine="fsdp", compression="fp16"), True, None, "with compression fp16"),
        (Change(engine="fsdp"), False, None, "whole tensors"),
        (Change(engine="fsdp"), True, "layer{}.w", "a block of the model"),
    ],
)
def test_what_the_model_does_not_know_is_refused(
    pair: Evidence, change: Change, by_element: bool, name: str | None, message: str
) -> None:
    named = [replace(each, name=name.format(n) if name else each.name) for n, each in enumerate(pair.gradients)]
    gradients = [replace(each, whole=not by_element) for each in named]
    with pytest.raises(ConfigError, match=message):
        predict(replace(pair, gradients=gradients), change)


def test_another_engine_divides_nothing_unless_asked(tmp_path: Path) -> None:
    evidence = _run(tmp_path / "run", options={"parallel": {"shard": "gradients"}})
    assert changed_job(evidence, Change(size=4)).plan.shard == "gradients"
    assert changed_job(evidence, Change(engine="ddp")).plan.shard == "none"


@pytest.mark.parametrize("limit", [1, 100, 120, 1000, 10_000])
def test_buckets_of_ddp_are_those_of_torch(limit: int) -> None:
    sizes = [30, 7, 400, 1, 1, 90, 250, 3000, 5]
    found = fill_ddp([Gradient(str(i), (size,)) for i, size in enumerate(sizes)], limit)
    expected, _ = dist._compute_bucket_assignment_by_size([torch.empty(size) for size in sizes], [limit])
    assert [[int(gradient.name) for gradient in bucket] for bucket in found] == expected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 300)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(300, 301), nn.Linear(301, 300)) for _ in range(3))
        self.head = nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embed(x)
        for layer in self.layers:
            found = layer(found)
        return self.head(found)  # type: ignore[no-any-return]


def _gradients(model: nn.Module) -> list[Gradient]:
    return [Gradient(name, tuple(p.shape), state_bytes=(8, 4)) for name, p in model.named_parameters()]


def _bytes(plan: Plan, ranks: Ranks, passes: int = 1) -> dict[str, Any]:
    return {each.what: each.nbytes for each in held(plan, _gradients(Net()), ranks, passes)}


def test_units_are_the_blocks_of_a_model() -> None:
    model = Net()
    names = {module: name for name, module in model.named_modules()}
    inside = {id(p): names[block] for block in blocks(model) for p in block.parameters()}
    for name, parameter in model.named_parameters():
        assert Gradient(name, ()).block == inside.get(id(parameter), "")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bucket_mib", [None, 0.5])
def test_memory_of_a_divided_optimizer_is_that_of_its_engine(size: int, bucket_mib: float | None) -> None:
    """And so are its buckets."""
    plan, ranks = Plan(bucket_mib=bucket_mib, shard="gradients"), Ranks(size, size)
    expected = _bytes(plan, ranks)

    def body(comm: ThreadComm) -> tuple[int, int, list[list[str]]]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        engine = make_engine(optimizer, model, comm, Plan(bucket_mib=bucket_mib or size, shard="gradients"))
        assert isinstance(engine.sums, AmongCopies)
        engine.begin(1)
        engine.backward(model(torch.tensor([1])).sum())
        gradients = engine.finish()
        summed = sum(buffer.nbytes for buffer in engine.buffers())
        optimizer.step()
        assert len(gradients) == len(optimizer.state)
        state = sum(slot.nbytes for slots in optimizer.state.values() for slot in slots.values())
        names = [[part.name for part in bucket.layout.shape.parts] for bucket in engine.sums._divided[0].buckets]
        return summed, state, names

    summed, state, names = zip(*on_ranks(size, body), strict=True)
    assert (set(summed), max(state)) == ({expected["gradients"]}, expected["state"])
    assert expected["parameters"] == sum(p.numel() * 4 for p in Net().parameters())
    assert names[0] == [bucket.names for bucket in buckets(plan, _gradients(Net()), ranks, parse("none"))]


def test_memory_of_fsdp_is_that_of_rows() -> None:
    rows = sum(torch.chunk(parameter, 3)[0].numel() for parameter in Net().parameters())
    steps = 4 * sum(1 for _ in Net().parameters())
    found = _bytes(Plan("fsdp", shard="parameters"), Ranks(3, 3))
    assert found == {"parameters": 4 * rows, "gradients": 4 * rows, "state": 8 * rows + steps}


def test_whole_gradients_are_held_where_only_the_last_pass_sums_them() -> None:
    plans = [("optimizer", 2), ("gradients", 2), ("optimizer", 1)]
    whole, *halves = (_bytes(Plan(shard=shard), Ranks(2, 2), passes)["gradients"] for shard, passes in plans)
    assert whole == sum(4 * p.numel() for p in Net().parameters())
    assert halves == pytest.approx([whole / 2] * 2, rel=0.1)
    sums_in_fp32 = held(Plan(shard="gradients"), [Gradient("w", (4096, 64), "bfloat16")], Ranks(2, 2))[1]
    assert sums_in_fp32.nbytes == 4 * 2048 * 64


def test_forward_needs_units_in_the_order_opposite_to_backward(pair: Evidence) -> None:
    starts = _starts(pair, 1.0)
    order = [starts[gradient.unit] for gradient in finished(pair.gradients)]
    assert order == sorted(order, reverse=True) and order[0] > order[-1] >= 0


def test_unknown_state_is_unknown(tmp_path: Path) -> None:
    evidence = _run(tmp_path / "run", state_bytes=None)
    for shard in ("none", "optimizer"):
        assert held(Plan(shard=shard), evidence.gradients, evidence.job.ranks)[-1].nbytes is None
