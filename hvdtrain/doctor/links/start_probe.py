"""Measure links: between ranks with the MPI of Horovod, between hosts by ranks that mpirun starts on them, or with TCP.

One pair of hosts at a time measures on each link.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.hosts.survey import Hosts, NoAnswerError, Survey
from hvdtrain.doctor.links.measured import MOST_S, Direction, Links, budget_s, rounds
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.launch.choose import AUTO, choose
from hvdtrain.launch.detect import detect_machine
from hvdtrain.launch.spec import Command, JobSpec, Mpi, join
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.variables import agent_environment
from hvdtrain.programs import run_program
from hvdtrain.runtime import mpi
from hvdtrain.runtime.environment import RankInfo, environ, rank_label

EACH = 2
"""Ranks per host: two, so that links within a host are measured too."""
_START_S = 60.0
_END_S = 5.0
_TAIL = 6  # number of mpirun's last lines in an error message

_NAME_BYTES = 256
_SMALL_BYTES = 8
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 23
_WARM, _PINGS = 20, 1000
_PART = 1 / 16  # messages grow until one takes this part of the time for a direction
_PAUSE_S = 1e-3


def measure_links(
    hosts: Hosts, job: JobSpec, environment: Mapping[str, str], survey: Survey
) -> tuple[list[Finding], Links | None]:
    """Measure the links between the hosts that reach all others: with MPI if possible, else with TCP."""
    findings, names = list[Finding](), survey.reachable
    left_out = [host for host in survey.slots if host not in names]
    if left_out:
        found, why = f"not measured: {', '.join(left_out)}", "not all other hosts reach them"
        findings.append(Finding("probe", "warning", found, why, "fix the broken findings above, then run it again"))
    if not names or (len(names) == 1 and left_out):
        return findings, None
    if why := obstacle(survey, names):
        findings.append(Finding("probe", "ok", "measured with TCP", why))
    else:
        try:
            return findings, measure_by_mpi(job, environment, names, job.interface or common_interface(survey, names))
        except HvdtrainError as error:
            found = f"{error.what} {error.found or ''}".strip()
            why = "links are measured with TCP instead of MPI"
            findings.append(Finding("probe", "warning", found, why, error.next_step or ""))
    return findings, measure_by_tcp(hosts, names) if len(names) > 1 else None


def obstacle(survey: Survey, hosts: Sequence[str]) -> str:
    """Return why MPI cannot measure these hosts; "" if it can."""
    lacking = [host for host in hosts if not survey.facts[host].mpi4py]
    if lacking:
        return f"no mpi4py on {', '.join(lacking)}; install it with: pip install 'hvdtrain[bench]'"
    without = [host for host in hosts if not survey.facts[host].libmpi]
    return f"Horovod cannot load an MPI on {', '.join(without)}" if without else ""


def command(job: JobSpec, hosts: Sequence[str], interface: str, mpi: Mpi) -> Command:
    """Return the command that starts the probe on these hosts of a job.

    ``interface`` is that between the hosts, or their network; "" lets MPI choose. ``mpi`` is the MPI of Horovod.
    """
    slots = dict.fromkeys(hosts, EACH)
    probe = replace(job, ranks=EACH * len(hosts), nodes=len(hosts), hosts=slots, interface=interface, mpi=mpi)
    made = TARGETS[mpi.flavour].render(probe)
    assert isinstance(made, Command)
    return made


def common_interface(survey: Survey, hosts: Sequence[str]) -> str:
    """Return the interface between these hosts if it has the same name on all of them, else ""."""
    attempts = [survey.attempts.get(host, {}) for host in hosts]
    used = {attempt.interface for row in attempts for other, attempt in row.items() if other in hosts}
    return used.pop() if len(used) == 1 else ""


def measure_by_mpi(job: JobSpec, environment: Mapping[str, str], hosts: Sequence[str], interface: str) -> Links:
    """Measure by ranks that mpirun starts. Errors: LaunchError if mpirun failed, or there is none."""
    mpi = choose(AUTO, (), detect_machine(environment)).mpi
    if mpi is None:
        raise LaunchError("The mpirun of Horovod's MPI is missing.", next_step="hvdtrain doctor")
    made = command(job, hosts, interface, mpi)
    variables = {**agent_environment(environment), **made.variables}
    try:
        code, out, err = run_program(made.argv, MOST_S + _START_S, variables, end_s=_END_S)
    except OSError as error:
        raise LaunchError("mpirun did not end.", found=str(error), next_step=join(made.argv)) from None
    links = _parse_links(out)
    if links is None:
        output = [line.strip() for line in (out + err).splitlines() if line.strip(" -")]
        found = f"exit code {code}: {' '.join(output[-_TAIL:])}"
        raise LaunchError("mpirun did not measure these hosts.", found=found, next_step=join(made.argv))
    return links


def measure_by_tcp(hosts: Hosts, names: Sequence[str]) -> Links:
    """Measure all pairs of `names`, which reach each other. Pairs without a common host are measured in parallel."""
    each_s = budget_s(len(names))
    directions: list[Direction] = []

    def one(pair: tuple[str, str]) -> Direction | None:
        try:
            return Direction(*pair, *hosts.measure(*pair, each_s))
        except NoAnswerError:
            return None

    for pairs in rounds(len(names)):
        named = [(names[a], names[b]) for a, b in pairs]
        directions += [found for found in hosts.in_parallel(one, named) if found is not None]
    return Links(list(names), directions, "TCP, one stream")


def _parse_links(text: str) -> Links | None:
    """Find the JSON report of rank 0 in the output of mpirun."""
    for line in text.splitlines():
        try:
            return msgspec.convert(json.loads(line)["links"], Links)
        except (ValueError, KeyError, TypeError):
            continue
    return None


def measure_ranks(info: RankInfo) -> Links | None:
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
