"""``--parallel.sync``: what is understood, what is refused, and the settings of each method."""

from __future__ import annotations

from itertools import chain

import pytest

from hvdtrain.config.parse import parse_argv
from hvdtrain.config.sync import OuterPlan, apportion, outer_plan, parse_sync
from hvdtrain.data.order import Workers
from hvdtrain.engine.outer import divide
from hvdtrain.errors import ConfigError
from hvdtrain.plan.refusals import resolve


def plan(*options: str) -> OuterPlan | None:
    return outer_plan(parse_argv(["--parallel.workers=2", *(f"--{option}" for option in options)], None).config)


def test_names_and_steps() -> None:
    assert parse_sync("every_step") == ("every_step", 1)
    assert parse_sync("diloco:32") == ("diloco", 32)
    assert outer_plan(parse_argv([], None).config) is None


@pytest.mark.parametrize(
    "text", ["", "auto", "diloco", "diloco:", "diloco:0", "diloco:-1", "diloco:1.5", "x:3", "every_step:2"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.sync"):
        parse_sync(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["parallel.sync=local:8"], OuterPlan(2, 8, lr=1.0, momentum=0.0)),
        (["parallel.sync=diloco:8"], OuterPlan(2, 8)),
        (["parallel.sync=diloco:8", "outer.lr=0.5", "outer.compression=none"], OuterPlan(2, 8, lr=0.5, coding="none")),
        (["parallel.sync=diloco:8", "outer.shares=3,1"], OuterPlan(2, 8, shares=(3, 1))),
        (["parallel.sync=streaming:32"], OuterPlan(2, 32, fragments=4, delay=4, mix=0.5)),
        (["parallel.sync=streaming:6"], OuterPlan(2, 6, fragments=3, delay=1, mix=0.5)),
        (["parallel.sync=streaming:5", "outer.delay=0"], OuterPlan(2, 5)),
        (["parallel.sync=sparseloco:30"], OuterPlan(2, 30, lr=1.0, momentum=0.0, feedback=0.95, coding="topk:0.03")),
    ],
)
def test_the_settings_of_a_method(options: list[str], expected: OuterPlan) -> None:
    assert plan(*options) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["parallel.sync=diloco:8", "parallel.workers=null"], "needs --parallel.workers"),
        (["parallel.workers=2"], "no effect"),
        (["parallel.sync=diloco:8", "parallel.workers=1"], "out of range"),
        (["parallel.sync=diloco:8", "parallel.workers=9"], "9 workers, but a step has only 8 micro-batch"),
        (["parallel.sync=diloco:8", "outer.fragments=3"], "does not divide"),
        (["parallel.sync=diloco:8", "outer.delay=8"], "not below the 8 steps"),
        (["parallel.sync=diloco:8", "outer.compression=int3"], "outer.compression"),
        (["parallel.sync=diloco:8", "precision=fp16"], "fp16"),
        (["parallel.sync=diloco:8", "train.ema=0.9"], "train.ema"),
        (["parallel.sync=diloco:8", "parallel.compression=auto"], "compression auto"),
        (["parallel.sync=diloco:8", "parallel.buffers=check"], "buffers check"),
        (["parallel.sync=diloco:8", "parallel.shard=optimizer"], "does not support --parallel.sync"),
        (["parallel.sync=diloco:8", "parallel.engine=fsdp"], "does not support --parallel.sync"),
        (["parallel.sync=diloco:8", "parallel.engine=ddp"], "does not support --parallel.sync"),
        (["parallel.sync=diloco:8", "outer.momentum=1"], "outer.momentum"),
        (["parallel.sync=diloco:8", "outer.mix=1"], "outer.mix"),
        *(
            (["parallel.sync=diloco:8", f"outer.shares={text}"], "invalid --outer.shares")
            for text in ("1,2,3", "1,0", "1,x", "2")
        ),
        (["parallel.sync=diloco:8", "outer.shares=17,1"], "leaves a worker without any of the 8 micro-batches"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(parse_argv(["--parallel.workers=2", *(f"--{option}" for option in options)], None).config)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(
    ("count", "parts"),
    [(1, ()), (2, ()), (4, ()), (7, ()), (2, (2, 1)), (2, (1, 2)), (4, (5, 1, 1, 3)), (3, (7, 7, 7))],
)
def test_ranks_share_out_workers_and_micro_batches(count: int, parts: tuple[int, ...], ranks: int) -> None:
    """Whatever the ranks, each worker has the same micro-batches, and each micro-batch one rank."""
    workers = Workers(count, ranks, parts)
    for worker in range(count):
        assert [rank for rank in range(ranks) if worker in workers.served_by(rank)] == list(workers.ranks_of(worker))
    for batches in (count, 13, 16):
        of_worker: dict[int, list[int]] = {worker: [] for worker in range(count)}
        for rank in range(ranks):
            for worker, share in zip(workers.served_by(rank), workers.shares(batches, rank), strict=True):
                of_worker[worker] += share
        alone = [list(share) for share in Workers(count, 1, parts).shares(batches, 0)]
        assert [sorted(of_worker[worker]) for worker in range(count)] == alone
        assert list(chain.from_iterable(alone)) == list(range(batches))
        assert [len(share) for share in alone] == apportion(batches, parts or (1,) * count)
    served = [list(workers.ranks_of(worker)) for worker in range(count)]
    assert workers.leaders() == sorted({ranks[0] for ranks in served})
    groups = [group for group in [*served, workers.leaders()] if len(group) > 1]
    assert workers.groups() == (groups if ranks > count else []), "all ranks have a communicator already"


@pytest.mark.parametrize(
    ("count", "parts", "expected"),
    [
        (16, (2, 1), [11, 5]),
        (3, (2, 1), [2, 1]),
        (5, (1, 1, 1), [2, 2, 1]),
        (1, (1, 1), [1, 0]),
        (4, (1, 1000), [0, 4]),
        (7, (1, 2, 4), [1, 2, 4]),
    ],
)
def test_micro_batches_are_divided_in_proportion(count: int, parts: tuple[int, ...], expected: list[int]) -> None:
    assert apportion(count, parts) == expected


def test_fragments_are_of_equal_size() -> None:
    sizes = [100, 7, 7, 7, 100, 7, 7, 7, 50]
    found = divide(sizes, 3)
    assert sorted(chain.from_iterable(found)) == list(range(9))
    totals = [sum(sizes[index] for index in each) for each in found]
    assert max(totals) - min(totals) <= 60
