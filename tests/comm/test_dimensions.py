"""Which ranks divide matrices and experts, which hold copies, and which have the same samples."""

from __future__ import annotations

from itertools import product

import pytest

from hvdtrain.comm import mesh
from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.comm.mesh import Mesh, make_mesh, mesh_groups
from hvdtrain.errors import ConfigError, LaunchError
from tests.support.thread_comm import ThreadComm, on_ranks

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


@pytest.mark.parametrize(
    ("size", "dimensions", "expected"),
    [
        (8, Dimensions(2, 4), ["4 groups", "0-1, 2-3, 4-5, 6-7; 4 x", "0-3, 4-7; 2 x"]),
        (4, Dimensions(2, 1, 2), ["all ranks have the same", "0-1, 2-3; 2 x", "0+2, 1+3", "0-1, 2-3; 2 x"]),
        (2, Dimensions(pp=2, virtual_stages=3), ["all ranks have the same", "0, 1; 3 groups of layers each"]),
        (8, Dimensions(tp=2, pp=2), ["2 groups", "0-3, 4-7", "0-1, 2-3, 4-5, 6-7; 2 x", "0-1, 2-3, 4-5, 6-7; 2 x"]),
        (12, Dimensions(1, 2), ["each rank has its own", "0-1, 2-3, 4-5, 6-7, ...; 6 x"]),
    ],
)
def test_a_table_says_which_ranks_do_what_together(size: int, dimensions: Dimensions, expected: list[str]) -> None:
    lines = dimensions.table(size)
    assert len(lines) == len(expected) and lines[0].startswith(expected[0])
    assert all(f": ranks {ranks}" in line for line, ranks in zip(lines[1:], expected[1:], strict=True))


def test_each_pipeline_needs_as_many_passes_as_stages_or_a_multiple_with_virtual_ones() -> None:
    virtual = Dimensions(pp=2, virtual_stages=3)
    for dimensions, passes in ((Dimensions(pp=2), 4), (Dimensions(2, 2), 1), (Dimensions(tp=2, pp=2), 2), (virtual, 8)):
        dimensions.check_passes(4, passes)
    with pytest.raises(ConfigError, match=r"--parallel.pp 2, but a pipeline has 1") as caught:
        Dimensions(pp=2).check_passes(4, 3)
    assert str(caught.value.expected).startswith("2 or more")
    with pytest.raises(ConfigError, match=r"6 micro-batches"):
        virtual.check_passes(4, 6)


@pytest.mark.parametrize(
    ("size", "dimensions", "words"),
    [
        (4, Dimensions(tp=2, virtual_stages=3), "virtual_stages 3 without a pipeline"),
        (1, Dimensions(2, 1), "start more ranks"),
    ],
)
def test_what_does_not_fit_is_refused(size: int, dimensions: Dimensions, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dimensions.check(size)
    assert words in str(caught.value)
    Dimensions(pp=2, virtual_stages=3).check(4)


def test_ranks_with_the_same_samples_divide_the_experts_unless_more_do() -> None:
    assert [Dimensions(2, 1).experts, Dimensions(2, 4).experts, Dimensions(1, 4).experts] == [2, 4, 4]
    assert not ONE and ONE.groups(8) == [] and ONE.samples(3, 8) == (3, 8, True), "data parallel"


@pytest.mark.parametrize(("size", "dp_shard"), [(4, 2), (6, 2), (6, 3), (64, 8)])
def test_two_ranks_share_at_most_one_group(size: int, dp_shard: int) -> None:
    groups = mesh_groups(size, dp_shard)
    for rank in range(size):
        shard, replicas = [set(group) for group in groups if rank in group]
        assert (len(shard), len(replicas)) == (dp_shard, size // dp_shard)
        assert shard & replicas == {rank} and max(shard) - min(shard) == dp_shard - 1


@pytest.mark.parametrize(("size", "dp_shard"), [(4, None), (4, 4), (1, 8)])
def test_one_group_needs_no_other_communicators(size: int, dp_shard: int | None) -> None:
    assert mesh_groups(size, dp_shard) == []

    def body(comm: ThreadComm) -> None:
        assert make_mesh(comm, dp_shard) == Mesh(comm, list(range(size)))

    on_ranks(size, body)


@pytest.mark.parametrize(("size", "dp_shard"), [(4, 3), (4, 8), (7, 2)])
def test_groups_of_unequal_size_are_refused(size: int, dp_shard: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} ranks cannot form groups") as caught:
        mesh_groups(size, dp_shard)
    assert str(caught.value.expected).endswith("2, 4" if size == 4 else "7")


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_group_that_fits_on_a_host_is_on_one(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: ThreadComm) -> Mesh:
        comm.local_size = 2
        host = comm.rank % 2 if in_turn else comm.rank // 2
        monkeypatch.setattr(mesh.socket, "gethostname", lambda: f"node{host}")
        return make_mesh(comm, 2)

    if in_turn:
        with pytest.raises(LaunchError, match="ranks 0 to 1 share a model across hosts") as caught:
            on_ranks(4, body)
        assert caught.value.found == "node0, node1" and caught.value.everywhere
        return
    for number, found in enumerate(on_ranks(4, body)):
        assert found.replicas is not None
        place = (found.shard.rank, found.shard.size, found.shard.local_rank, found.shard.local_size)
        assert place == (number % 2, 2, number % 2, 2) and found.shard_ranks == [number // 2 * 2, number // 2 * 2 + 1]
        place = (found.replicas.rank, found.replicas.size, found.replicas.local_rank, found.replicas.local_size)
        assert place == (number // 2, 2, 0, 1)
