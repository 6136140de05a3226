"""A mesh of ranks: groups that divide a model, and between them groups that hold equal parts of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError, LaunchError

_OPTION = "--parallel.dp_shard"


@dataclass(frozen=True)
class Mesh:
    """The groups of one rank."""

    shard: Comm  # those that together hold the whole model
    shard_ranks: list[int]  # their ranks among all
    replicas: Comm | None = None  # those that hold the same part; None if all ranks divide the model


def mesh_groups(size: int, dp_shard: int | None) -> list[list[int]]:
    """Return the ranks of each group: first those that divide the model, then those that hold the same part. Pure.

    `dp_shard` ranks divide the model; they are consecutive. No groups are returned if that is all `size` ranks.

    Errors: ConfigError: the ranks cannot form such groups.
    """
    if dp_shard is None or dp_shard == size or size == 1:
        return []
    if size % dp_shard:
        fitting = [str(n) for n in range(2, size + 1) if size % n == 0]
        raise ConfigError(
            f"{size} ranks cannot form groups of {_OPTION} {dp_shard}",
            expected=f"a divisor of the number of ranks: {', '.join(fitting)}",
            next_step="usually, it is the number of ranks on a host",
        )
    shards = [list(range(first, first + dp_shard)) for first in range(0, size, dp_shard)]
    return [*shards, *(list(range(index, size, dp_shard)) for index in range(dp_shard))]


def gather_hosts(comm: Comm) -> list[list[str | int]]:
    """Return the name of each rank's host, and the number of its ranks. Collective: yes."""
    from hvdtrain.comm.objects import allgather_json

    return allgather_json(comm, [socket.gethostname(), comm.local_size], name="mesh/hosts")


def subset(comm: Comm, ranks: Sequence[int], hosts: Sequence[object]) -> Comm:
    """Return a communicator of some ranks with this one. `hosts`: of all ranks. Collective: yes, among them."""
    here = [rank for rank in ranks if hosts[rank] == hosts[comm.rank]]
    return comm.subset(ranks, here.index(comm.rank), len(here))


def comm_among(comm: Comm, ranks: Sequence[int], hosts: Sequence[object]) -> Comm:
    """Return `comm` itself if these are all its ranks, else a `subset`. Collective: yes, among them."""
    return comm if len(ranks) == comm.size else subset(comm, ranks, hosts)


def make_mesh(comm: Comm, dp_shard: int | None) -> Mesh:
    """Make the communicators of a mesh. Collective: yes.

    Errors: ConfigError: the ranks cannot form such groups; LaunchError: a group that fits on one host is on several.
    """
    own = [ranks for ranks in mesh_groups(comm.size, dp_shard) if comm.rank in ranks]
    if not own:
        return Mesh(comm, list(range(comm.size)))
    hosts = gather_hosts(comm)
    _check_hosts(hosts, len(own[0]))
    return Mesh(subset(comm, own[0], hosts), own[0], subset(comm, own[1], hosts))


def _check_hosts(hosts: list[list[str | int]], dp_shard: int) -> None:
    for first in range(0, len(hosts), dp_shard):
        group = hosts[first : first + dp_shard]
        names = list(dict.fromkeys(str(name) for name, _ in group))
        if len(names) > 1 and min(int(local_size) for _, local_size in group) >= dp_shard:
            raise LaunchError(
                f"{_OPTION} {dp_shard}: ranks {first} to {first + dp_shard - 1} share a model across hosts",
                expected="consecutive ranks on a host",
                found=", ".join(names),
                next_step=f"a value of {_OPTION} that divides the number of ranks on each host; or start the ranks host"
                " by host: mpirun --map-by slot, srun --distribution=block",
                everywhere=True,
            )
