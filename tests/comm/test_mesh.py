"""The groups of ranks that divide a model, and between them those that hold the same part."""

from __future__ import annotations

import pytest

from hvdtrain.comm import mesh
from hvdtrain.comm.mesh import Mesh, make_mesh, mesh_groups
from hvdtrain.errors import ConfigError, LaunchError
from tests.support.thread_comm import ThreadComm, on_ranks


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
        assert make_mesh(comm, dp_shard) == Mesh(comm, comm, list(range(size)))

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
