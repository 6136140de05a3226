"""Links measured by the MPI that Horovod speaks, between ranks: a pair of hosts at a time on each link."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.doctor.links.link_pairs import budget_s, rounds
from hvdtrain.doctor.links.measured import Links, Way
from hvdtrain.errors import LaunchError
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo, environ, rank_label

_NAME_BYTES = 256
_SMALL_BYTES = 8
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 23
_WARM, _PINGS = 20, 1000
_PART = 1 / 16
"""Of a way's time: messages grow until one takes so long."""
_PAUSE_S = 1e-3


def measure(info: RankInfo) -> Links | None:
    """Measure all pairs of hosts, and two ranks of each host that has as many; on rank 0, None elsewhere.

    Collective: yes. MPI is started by it.

    Errors:
        LaunchError: there is no mpi4py, it speaks another MPI than Horovod, or the ranks did not meet.
    """
    world = _world(info)
    names, ranks = _hosts(world, info.host)
    each_s = budget_s(len(names))
    inside = [(host, host) for host, both in enumerate(ranks) if len(both) > 1]
    found = np.zeros((len(names), len(names), 2))
    for pairs in [inside, *rounds(len(names))]:
        _wait(world)
        for a, b in pairs:
            first, second = (ranks[a][0], ranks[b][0] if a != b else ranks[a][1])
            if world.rank in (first, second):
                _meet(world, (a, first), (b, second), each_s, found)
    _wait(world)
    together = np.zeros_like(found)
    world.Reduce(found, together, root=0)
    if world.rank != 0:
        return None
    ways = [
        Way(names[a], names[b], *map(float, together[a, b])) for a, b in np.argwhere(together[:, :, 1] > 0).tolist()
    ]
    return Links(names, ways, f"MPI ({mpi_name(world)})")


def mpi_name(world: Any) -> str:
    """Name and release of the MPI that carries it."""
    from mpi4py import MPI

    return str(MPI.Get_library_version()).splitlines()[0].split(", ")[0].strip()


def wrong_library(maps: str, wanted: Path) -> str | None:
    """The MPI library that this process has loaded, where it is not the wanted one.

    Args:
        maps: of the process, as ``/proc/self/maps`` has them.
        wanted: the one that Horovod loads.
    """
    paths = [Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6]
    loaded = {str(path.resolve()) for path in paths if path.name.startswith(("libmpi.", "libmpich.", "libmpi_"))}
    return None if not loaded or str(wanted.resolve()) in loaded else min(loaded)


def _world(info: RankInfo) -> Any:
    """All ranks, of the MPI that Horovod speaks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{rank_label(info)}: the links are measured by mpi4py, which cannot be imported: {error}",
            next_step="pip install 'hvdtrain[bench]'; hvdtrain doctor --hosts a,b --probe measures by TCP without it",
        ) from None
    library = mpi.mpi_library(mpi.horovod_library(), environ())
    if library is not None and library.path is not None:
        other = wrong_library(Path("/proc/self/maps").read_text(), library.path)
        if other is not None:
            raise LaunchError(
                f"{rank_label(info)}: mpi4py speaks another MPI than Horovod.",
                expected=str(library.path),
                found=other,
                next_step=f"export MPI4PY_LIBMPI={library.path}; or pip install --no-binary mpi4py mpi4py, with that "
                "MPI's mpicc first on PATH",
            )
    if MPI.COMM_WORLD.size != info.size:
        raise LaunchError(
            f"{rank_label(info)}: mpi4py did not join the ranks that {info.launcher} started.",
            expected=f"{info.size} ranks",
            found=str(MPI.COMM_WORLD.size),
            next_step="start it with the mpirun of the MPI that Horovod was built with; see: hvdtrain doctor",
        )
    return MPI.COMM_WORLD


def _hosts(world: Any, name: str) -> tuple[list[str], list[list[int]]]:
    """Names of all hosts, and the ranks of each; the same on every rank."""
    from mpi4py import MPI

    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    lead = np.array([world.rank], dtype=np.int64)
    here.Bcast(lead, root=0)
    leads = np.zeros(world.size, dtype=np.int64)
    world.Allgather(lead, leads)
    own = np.frombuffer(name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), dtype=np.uint8)
    said = np.zeros((world.size, _NAME_BYTES), dtype=np.uint8)
    world.Allgather(own, said)
    order = sorted(set(leads.tolist()))
    names = [said[first].tobytes().rstrip(b"\0").decode(errors="replace") for first in order]
    return names, [[rank for rank in range(world.size) if leads[rank] == first] for first in order]


def _wait(world: Any) -> None:
    """Wait for all without keeping a core busy, which those who still measure may need."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(_PAUSE_S)


def _meet(world: Any, one: tuple[int, int], other: tuple[int, int], each_s: float, found: NDArray[np.float64]) -> None:
    """Measure both directions, one after another; who sends writes it down. Hosts and ranks of the two are given."""
    ways = [(one, other)] if one[0] == other[0] else [(one, other), (other, one)]
    for (source, sender), (target, receiver) in ways:
        if world.rank == sender:
            found[source, target] = _latency_s(world, receiver), _bytes_per_s(world, receiver, each_s)
        else:
            _answer(world, sender)


def _latency_s(world: Any, other: int) -> float:
    ping, taken = np.zeros(_SMALL_BYTES, dtype=np.uint8), []
    for _ in range(_WARM + _PINGS):
        before_s = time.perf_counter()
        world.Send(ping, dest=other)
        world.Recv(ping, source=other)
        taken.append(time.perf_counter() - before_s)
    return median(taken[_WARM:]) / 2


def _bytes_per_s(world: Any, other: int, each_s: float) -> float:
    """Of messages that grow until one takes a while; those before pass through what the link lets pass at once."""
    data, ack = np.zeros(_MOST_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    size, rates = _FIRST_BYTES, list[float]()
    until_s = time.perf_counter() + each_s
    while not rates or time.perf_counter() < until_s:
        before_s = time.perf_counter()
        world.Send(np.array([size], dtype=np.int64), dest=other)
        world.Send(data[:size], dest=other)
        world.Recv(ack, source=other)
        took_s = time.perf_counter() - before_s
        if took_s < each_s * _PART and size < _MOST_BYTES:
            size *= 2
        else:
            rates.append(size / took_s)
    world.Send(np.zeros(1, dtype=np.int64), dest=other)
    return median(rates)


def _answer(world: Any, other: int) -> None:
    ping, size = np.zeros(_SMALL_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    for _ in range(_WARM + _PINGS):
        world.Recv(ping, source=other)
        world.Send(ping, dest=other)
    room, ack = np.zeros(_MOST_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    while True:
        world.Recv(size, source=other)
        if not size[0]:
            return
        world.Recv(room[: size[0]], source=other)
        world.Send(ack, dest=other)
