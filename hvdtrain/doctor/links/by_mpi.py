"""Measure links between ranks with the MPI of Horovod, one pair of hosts at a time on each link."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvdtrain.doctor.links.measured import Direction, Links, budget_s, rounds
from hvdtrain.errors import LaunchError
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo, environ, rank_label

_NAME_BYTES = 256
_SMALL_BYTES = 8
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 23
_WARM, _PINGS = 20, 1000
_PART = 1 / 16  # messages grow until one takes this part of the time for a direction
_PAUSE_S = 1e-3


def measure(info: RankInfo) -> Links | None:
    """Measure all pairs of hosts, and two ranks within each host. Return the links on rank 0, None elsewhere.

    It initializes MPI. Collective: yes. Errors: LaunchError if mpi4py is missing or uses another MPI than Horovod, or
    the ranks do not form one job.
    """
    world = _world(info)
    names, ranks = _hosts(world, info.host)
    each_s = budget_s(len(names))
    inside = [(host, host) for host, both in enumerate(ranks) if len(both) > 1]
    found = np.zeros((len(names), len(names), 2))
    for pairs in [inside, *rounds(len(names))]:
        _wait(world)
        for a, b in pairs:
            sender, receiver = ranks[a][0], ranks[b][int(a == b)]
            if world.rank == sender:
                found[a, b] = _latency_s(world, receiver), _bytes_per_s(world, receiver, each_s)
            elif world.rank == receiver:
                _answer(world, sender)
    _wait(world)
    total = np.zeros_like(found)
    world.Reduce(found, total, root=0)
    if world.rank != 0:
        return None
    directions = [
        Direction(names[a], names[b], *map(float, total[a, b])) for a, b in np.argwhere(total[:, :, 1] > 0).tolist()
    ]
    from mpi4py import MPI

    name = str(MPI.Get_library_version()).splitlines()[0].split(", ")[0].strip()
    return Links(names, directions, f"MPI ({name})")


def other_library(maps: str, wanted: Path) -> str | None:
    """Return the MPI library in ``/proc/self/maps`` if it is not the wanted one, which Horovod loads; else None."""
    paths = [Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6]
    loaded = {str(path.resolve()) for path in paths if path.name.startswith(("libmpi.", "libmpich.", "libmpi_"))}
    return None if not loaded or str(wanted.resolve()) in loaded else min(loaded)


def _world(info: RankInfo) -> Any:
    """Return the communicator of all ranks, after checking that mpi4py uses the MPI of Horovod."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{rank_label(info)}: mpi4py, which measures links, cannot be imported: {error}",
            next_step="pip install 'hvdtrain[bench]'; hvdtrain doctor --hosts a,b --probe measures with TCP instead",
        ) from None
    library = mpi.mpi_library(mpi.horovod_library(), environ())
    if library is not None and library.path is not None:
        other = other_library(Path("/proc/self/maps").read_text(), library.path)
        if other is not None:
            raise LaunchError(
                f"{rank_label(info)}: mpi4py uses another MPI than Horovod.",
                expected=str(library.path),
                found=other,
                next_step=f"export MPI4PY_LIBMPI={library.path}; or, with that MPI's mpicc first on PATH: "
                "pip install --no-binary mpi4py mpi4py",
            )
    if MPI.COMM_WORLD.size != info.size:
        raise LaunchError(
            f"{rank_label(info)}: mpi4py did not join the ranks that {info.launcher} started.",
            expected=f"{info.size} ranks",
            found=str(MPI.COMM_WORLD.size),
            next_step="use the mpirun of the MPI that Horovod was built with; hvdtrain doctor shows it",
        )
    return MPI.COMM_WORLD


def _hosts(world: Any, name: str) -> tuple[list[str], list[list[int]]]:
    """Return the names of all hosts and the ranks of each. Collective: yes; the result is the same on all ranks."""
    from mpi4py import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    lead = np.array([world.rank], dtype=np.int64)
    host.Bcast(lead, root=0)
    leads = np.zeros(world.size, dtype=np.int64)
    world.Allgather(lead, leads)
    own = np.frombuffer(name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"), dtype=np.uint8)
    texts = np.zeros((world.size, _NAME_BYTES), dtype=np.uint8)
    world.Allgather(own, texts)
    order = sorted(set(leads.tolist()))
    names = [texts[first].tobytes().rstrip(b"\0").decode(errors="replace") for first in order]
    return names, [[rank for rank in range(world.size) if leads[rank] == first] for first in order]


def _wait(world: Any) -> None:
    """Wait for all ranks without using CPU time that measuring ranks need. Collective: yes."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(_PAUSE_S)


def _latency_s(world: Any, other: int) -> float:
    ping, times_s = np.zeros(_SMALL_BYTES, dtype=np.uint8), []
    for _ in range(_WARM + _PINGS):
        start_s = time.perf_counter()
        world.Send(ping, dest=other)
        world.Recv(ping, source=other)
        times_s.append(time.perf_counter() - start_s)
    return median(times_s[_WARM:]) / 2


def _bytes_per_s(world: Any, other: int, each_s: float) -> float:
    """Measure bandwidth with messages that grow. Small ones only measure the burst that the link allows."""
    data, ack = np.zeros(_MOST_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    size, rates = _FIRST_BYTES, list[float]()
    deadline_s = time.perf_counter() + each_s
    while not rates or time.perf_counter() < deadline_s:
        start_s = time.perf_counter()
        world.Send(np.array([size], dtype=np.int64), dest=other)
        world.Send(data[:size], dest=other)
        world.Recv(ack, source=other)
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s < each_s * _PART and size < _MOST_BYTES:
            size *= 2
        else:
            rates.append(size / elapsed_s)
    world.Send(np.zeros(1, dtype=np.int64), dest=other)
    return median(rates)


def _answer(world: Any, other: int) -> None:
    ping, size = np.zeros(_SMALL_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    for _ in range(_WARM + _PINGS):
        world.Recv(ping, source=other)
        world.Send(ping, dest=other)
    buffer, ack = np.zeros(_MOST_BYTES, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    while True:
        world.Recv(size, source=other)
        if not size[0]:
            return
        world.Recv(buffer[: size[0]], source=other)
        world.Send(ack, dest=other)
