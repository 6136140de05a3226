"""Which ranks divide matrices and experts, which hold copies, and which have the same samples."""

from __future__ import annotations

from itertools import product

import pytest

from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.errors import ConfigError

FITTING = [
    (size * pp, Dimensions(tp, ep, cp, pp))
    for size, tp, ep, cp, pp in product((1, 2, 4, 8, 12), (1, 2, 4), (1, 2, 4, 8), (1, 2, 3), (1, 2, 3))
    if (tp, ep, cp, pp) != (1, 1, 1, 1) and size % (tp * cp) == 0 and size % ep == 0 and (ep == 1 or ep % tp == 0)
]


@pytest.mark.parametrize(("size", "dimensions"), FITTING)
def test_a_block_and_its_copies_share_one_rank(size: int, dimensions: Dimensions) -> None:
    for width in (dimensions.tp, dimensions.experts):
        for rank in range(size):
            block, copies = set(dimensions.block(rank, width)), set(dimensions.copies(rank, size, width))
            assert block & copies == {rank} and (len(block), len(copies)) == (width, size // dimensions.pp // width)
            assert max(block) - min(block) == width - 1
            assert block | copies <= {*dimensions.stage(rank, size)}


@pytest.mark.parametrize(("size", "dimensions"), FITTING)
def test_a_pipeline_has_a_rank_of_each_stage_with_the_same_samples_and_part(size: int, dimensions: Dimensions) -> None:
    for rank in range(size):
        ranks = dimensions.pipeline(rank, size)
        stages = [dimensions.stage(each, size) for each in ranks]
        assert rank in ranks and [each for stage in stages for each in stage] == [*range(size)]
        assert len({dimensions.samples(each, size)[0] for each in ranks}) == 1
        assert len({stage.index(each) for stage, each in zip(stages, ranks, strict=True)}) == 1


@pytest.mark.parametrize(("size", "dimensions"), FITTING)
def test_each_group_that_exchanges_is_made(size: int, dimensions: Dimensions) -> None:
    made = {tuple(group) for group in dimensions.groups(size)}
    for rank in range(size):
        exchanging = [dimensions.copies(rank, size, width) for width in (dimensions.tp, dimensions.experts)]
        for ranks in [*exchanging, dimensions.sequence(rank)]:
            assert rank in ranks and (tuple(ranks) in made or len(ranks) in (1, size))
        ends, stages = dimensions.ends(rank, size), (dimensions.stage(0, size), dimensions.stage(size - 1, size))
        if dimensions.pp > 1:
            assert ends == [r for stage in stages for r in stage if (r - rank) % dimensions.tp == 0]
            assert tuple(ends) in made or len(ends) == size
    assert len(made) == len(dimensions.groups(size)) and all(1 < len(group) < size for group in made)


@pytest.mark.parametrize("dimensions", [Dimensions(2), Dimensions(1, 2), Dimensions(2, 4), Dimensions(2, 4, 2)])
def test_each_group_of_ranks_with_the_whole_model_has_its_own_groups(dimensions: Dimensions) -> None:
    """Of 8 of 16 ranks; all of a group are in no group of these."""
    made = dimensions.groups(16, 8)
    assert sorted(made) == sorted([r + first for r in ranks] for first in (0, 8) for ranks in dimensions.groups(8))
    for rank in range(16):
        for width in (dimensions.tp, dimensions.experts):
            copies = dimensions.copies(rank, 16, width, 8)
            assert rank in copies and {each // 8 for each in copies} == {rank // 8} and len(copies) == 8 // width
            assert copies in made or len(copies) in (1, 8)
    with pytest.raises(ConfigError, match=r"3 rank\(s\) in a group of --parallel.dp_shard do not have"):
        dimensions.groups(12, 3)


@pytest.mark.parametrize(("size", "dimensions"), FITTING)
def test_of_ranks_with_the_same_samples_one_counts(size: int, dimensions: Dimensions) -> None:
    seen: dict[int, list[bool]] = {}
    for rank in range(size):
        place, places, counts = dimensions.samples(rank, size)
        assert places == size // dimensions.same_samples
        seen.setdefault(place, []).append(counts)
    assert sorted(seen) == list(range(size // dimensions.same_samples))
    assert all(sum(counts) == 1 and len(counts) == dimensions.same_samples for counts in seen.values())


@pytest.mark.parametrize(("size", "dimensions"), FITTING)
def test_each_part_of_a_sequence_counts_once(size: int, dimensions: Dimensions) -> None:
    """The parts have the same samples; of ranks with the same part and samples, one counts: the last stage's."""
    seen: dict[tuple[int, int], list[bool]] = {}
    for rank in range(size):
        ranks = dimensions.sequence(rank)
        assert len(ranks) == dimensions.cp and all(dimensions.sequence(other) == ranks for other in ranks)
        assert len({dimensions.samples(other, size)[0] for other in ranks}) == 1
        part = (dimensions.samples(rank, size)[0], ranks.index(rank))
        seen.setdefault(part, []).append(dimensions.loss_counts(rank, size))
    together = dimensions.tp * dimensions.pp
    assert len(seen) == size // together
    assert all(sum(counts) == 1 and len(counts) == together for counts in seen.values())
    assert all(any(counts[-dimensions.tp :]) for counts in seen.values())


def test_ranks_with_the_same_samples_divide_the_experts_unless_more_do() -> None:
    assert [Dimensions(2, 1).experts, Dimensions(2, 4).experts, Dimensions(1, 4).experts] == [2, 4, 4]


def test_data_parallel_ranks_need_no_groups() -> None:
    assert not ONE and ONE.groups(8) == [] and ONE.samples(3, 8) == (3, 8, True)


@pytest.mark.parametrize(
    ("size", "dimensions", "nearest"),
    [(4, Dimensions(3, 1), "--parallel.tp 2"), (6, Dimensions(1, 4), "--parallel.ep 3"),
     (8, Dimensions(4, 2), "--parallel.tp 4"), (8, Dimensions(1, 16), "--parallel.ep 8"),
     (6, Dimensions(2, 1, 2), "--parallel.cp 2"), (4, Dimensions(cp=3), "--parallel.cp 2"),
     (4, Dimensions(pp=3), "--parallel.pp 2"), (4, Dimensions(ep=4, pp=2), "--parallel.ep 4")],
)  # fmt: skip
def test_the_nearest_dimensions_that_fit_are_named(size: int, dimensions: Dimensions, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{size} rank.s. do not have the dimensions {dimensions.options}") as caught:
        dimensions.groups(size)
    assert caught.value.next_step == f"{nearest}, or another number of ranks"


def test_each_pipeline_needs_as_many_passes_as_stages() -> None:
    Dimensions(pp=2).check_passes(4, 4)
    Dimensions(2, 2).check_passes(4, 1)
    Dimensions(tp=2, pp=2).check_passes(4, 2)
    with pytest.raises(ConfigError, match=r"--parallel.pp 2, but a pipeline has 1 micro-batch.es. in a step") as caught:
        Dimensions(pp=2).check_passes(4, 3)
    assert str(caught.value.expected).startswith("2 or more")


def test_virtual_stages_need_a_pipeline_and_a_multiple_of_its_stages() -> None:
    virtual = Dimensions(pp=2, virtual_stages=3)
    virtual.check_passes(4, 8)
    virtual.check(4)
    with pytest.raises(ConfigError, match=r"2 pipeline.s. have 6 micro-batches in a step"):
        virtual.check_passes(4, 6)
    with pytest.raises(ConfigError, match=r"--parallel.virtual_stages 3 without a pipeline"):
        Dimensions(tp=2, virtual_stages=3).check(4)
    assert virtual.table(2)[1].endswith("ranks 0, 1; 3 groups of layers each")


def test_a_zero_bubble_needs_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"--parallel.zero_bubble true without a pipeline"):
        Dimensions(cp=2, zero_bubble=True).check(2)
    Dimensions(pp=2, zero_bubble=True).check(2)
    assert Dimensions(pp=2, zero_bubble=True).options == "--parallel.pp 2"


def test_one_rank_has_no_dimensions() -> None:
    with pytest.raises(ConfigError) as caught:
        Dimensions(2, 1).check(1)
    assert caught.value.next_step == "start more ranks"


def test_a_table_says_which_ranks_do_what_together() -> None:
    assert Dimensions(2, 4).table(8) == [
        "4 groups of ranks have their own samples",
        "  the same samples, and a part of each matrix: ranks 0-1, 2-3, 4-5, 6-7; 4 x each part",
        "  a part of the experts: ranks 0-3, 4-7; 2 x each part",
    ]
    assert Dimensions(2, 1, 2).table(8) == [
        "2 groups of ranks have their own samples",
        "  the same samples, and a part of each matrix: ranks 0-1, 2-3, 4-5, 6-7; 4 x each part",
        "  a part of each sequence: ranks 0+2, 1+3, 4+6, 5+7",
        "  a part of the experts: ranks 0-1, 2-3, 4-5, 6-7; 4 x each part",
    ]
    assert Dimensions(pp=2).table(6) == [
        "3 groups of ranks have their own samples",
        "  the layers of a stage, in this order: ranks 0-2, 3-5",
    ]
    assert Dimensions(tp=2, pp=2).table(8) == [
        "2 groups of ranks have their own samples",
        "  the layers of a stage, in this order: ranks 0-3, 4-7",
        "  the same samples, and a part of each matrix: ranks 0-1, 2-3, 4-5, 6-7; 2 x each part",
        "  a part of the experts: ranks 0-1, 2-3, 4-5, 6-7; 2 x each part",
    ]
    assert Dimensions(2, 1, 2).table(4)[0] == "all ranks have the same samples"
    assert Dimensions(1, 2).table(12) == [
        "each rank has its own samples",
        "  a part of the experts: ranks 0-1, 2-3, 4-5, 6-7, ...; 6 x each part",
    ]
