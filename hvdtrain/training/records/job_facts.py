"""Facts of a start that explain its results and its cost: versions, hosts, devices, counters of energy."""

from __future__ import annotations

import platform
import re
import socket
import sys
from collections import Counter as Tally
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hvdtrain
from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.files import read_text_or_empty
from hvdtrain.observe.energy import CPUS, GPUS, Counter, CpuCounter, GpuCounter, open_counter
from hvdtrain.observe.monitor import gpu_identity
from hvdtrain.runtime.clock import clock_id
from hvdtrain.runtime.host import Binding, binding_map, cpu_list, cpu_ranges

_LIBRARIES = ("torch", "horovod", "transformers", "numpy")


@dataclass(frozen=True)
class JobFacts:
    """Facts of a start.

    Attributes:
        record: of the whole job, for the event `started`: `devices` (their number; a GPU that ranks share counts once,
            and a rank on CPUs is a device), `machine` (hosts, and the number of each device by name), `versions`,
            `binding` (`binding_map`; empty if ranks are not bound), and `energy` (by kind, why its energy is not
            measured; empty if it is).
        counters: of energy, that this rank reads for the job, by kind.
    """

    record: Mapping[str, Any]
    counters: Mapping[str, Counter]


def gather_facts(comm: Comm, device: torch.device, root: Path = Path("/"), binding: Binding | None = None) -> JobFacts:
    """Gather the facts of all ranks. Collective: yes.

    The first rank of each host reads the counter of its processors, and the first rank of each GPU that of the GPU.
    ``root``: the root of the file system with ``sys`` and ``proc``. `binding`: of this rank.
    """
    gpu = gpu_identity(device)
    opened = {CPUS: open_counter(partial(CpuCounter, root))}
    if gpu is not None:
        opened = {GPUS: open_counter(partial(GpuCounter, gpu)), **opened}
    host = clock_id(root)  # equal in all containers of a host
    places = {CPUS: host, GPUS: f"{host} {gpu.uuid or gpu.pci_bus_id}" if gpu is not None else ""}
    mine = {
        "host": socket.gethostname(),
        "device": _device_name(device, root),
        "places": places,
        "energy": {kind: reason for kind, (_, reason) in opened.items()},
        "binding": [cpu_ranges(binding.cpus), binding.gpu, binding.kept] if binding is not None else None,
    }
    ranks = allgather_json(comm, mine, name="job/facts")
    counters = {
        kind: counter
        for kind, (counter, _) in opened.items()
        if counter is not None and _first(ranks, kind, places[kind]) == comm.rank
    }
    owners = [n for n, rank in enumerate(ranks) if _first(ranks, GPUS, rank["places"][GPUS]) == n] if gpu else None
    devices = [rank["device"] for n, rank in enumerate(ranks) if owners is None or n in owners]
    record = {
        "devices": len(devices),
        "machine": {"hosts": list(dict.fromkeys(rank["host"] for rank in ranks)), "devices": dict(Tally(devices))},
        "versions": versions(),
        "binding": _binding_map(ranks),
        "energy": {kind: _reason([rank["energy"].get(kind, "") for rank in ranks]) for kind in opened},
    }
    return JobFacts(record, counters)


def versions() -> dict[str, str]:
    """Return the versions of hvdtrain, Python, CUDA and loaded libraries."""
    found = {"hvdtrain": hvdtrain.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
            found[name] = str(version)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _first(ranks: list[dict[str, Any]], kind: str, place: str) -> int:
    """Return the first rank at a place."""
    return next(number for number, rank in enumerate(ranks) if rank["places"][kind] == place)


def _binding_map(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bound = [(rank["host"], rank["binding"]) for rank in ranks if rank["binding"] is not None]
    if len(bound) < len(ranks):  # not one of them: all have the same options
        return []
    return binding_map(
        [host for host, _ in bound], [Binding(cpu_list(cpus), gpu, kept) for _, (cpus, gpu, kept) in bound]
    )


def _reason(reasons: list[str]) -> str:
    """Return why the energy of a kind cannot be summed over all ranks; empty if it can."""
    missing = [reason for reason in reasons if reason]
    if not missing:
        return ""
    return missing[0] if len(missing) == len(reasons) else f"on {len(missing)} of {len(reasons)} ranks: {missing[0]}"


def _device_name(device: torch.device, root: Path) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    found = re.search(r"^model name\s*:\s*(.+)$", read_text_or_empty(root / "proc/cpuinfo"), re.MULTILINE)
    return f"CPU {found[1].strip() if found else platform.machine()}"
