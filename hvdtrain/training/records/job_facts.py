"""Facts of a start that explain its results and its cost: versions, hosts, devices, FLOPs, and the energy of all ranks.

The energy is in the journal while the run continues: what a run that is killed has used is known to a few seconds.
"""

from __future__ import annotations

import platform
import re
import socket
import sys
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hvdtrain
from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.config.schema import Config
from hvdtrain.files import read_text_or_empty
from hvdtrain.observe.energy import CPUS, GPUS, KINDS, Counter, CpuCounter, EnergyMeter, GpuCounter, open_counter
from hvdtrain.observe.flops import FlopCount, peak_tflops
from hvdtrain.observe.monitor import gpu_identity
from hvdtrain.runtime.clock import clock_id
from hvdtrain.runtime.host import Binding, binding_map, cpu_list, cpu_ranges, read_host
from hvdtrain.training.loop.step_part import StepPart
from hvdtrain.training.start.device import allows_tf32

_LIBRARIES = ("torch", "horovod", "transformers", "numpy")

EVERY_S = 10.0


def gather_facts(
    comm: Comm, device: torch.device, root: Path = Path("/"), binding: Binding | None = None
) -> tuple[dict[str, Any], dict[str, Counter]]:
    """Return facts of the whole job, and the counters of energy that this rank reads for it, by kind. Collective: yes.

    The facts are for the event `started`: `devices` (their number; a GPU that ranks share counts once, and a rank on
    CPUs is a device), `machine` (hosts, the number of each device by name, and on CPUs
    `busiest_host`), `versions`, `binding` (`binding_map`;
    empty if ranks are not bound), and `energy` (by kind, why its energy is not measured; empty if it is).

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
        "cores": read_host({}, root).cores,
        "threads": torch.get_num_threads(),
    }
    ranks = allgather_json(comm, mine, name="job/facts")
    counters = {
        kind: counter
        for kind, (counter, _) in opened.items()
        if counter is not None and _first(ranks, kind, places[kind]) == comm.rank
    }
    owners = [n for n, rank in enumerate(ranks) if _first(ranks, GPUS, rank["places"][GPUS]) == n] if gpu else None
    devices = [rank["device"] for n, rank in enumerate(ranks) if owners is None or n in owners]
    bindings = [rank["binding"] for rank in ranks if rank["binding"] is not None]
    bound = [Binding(cpu_list(cpus), gpu, kept) for cpus, gpu, kept in bindings]
    machine = {"hosts": list(dict.fromkeys(rank["host"] for rank in ranks)), "devices": dict(Tally(devices))}
    record = {
        "devices": len(devices),
        "machine": machine if gpu else {**machine, "busiest_host": _busiest_host(ranks)},
        "versions": versions(),
        # None if one is not bound: all have the same options.
        "binding": binding_map([rank["host"] for rank in ranks], bound) if len(bound) == len(ranks) else [],
        "energy": {kind: _reason([rank["energy"].get(kind, "") for rank in ranks]) for kind in opened},
    }
    return record, counters


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
    return next(number for number, rank in enumerate(ranks) if rank["places"][kind] == place)


def _busiest_host(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Return the cores of the host with the most threads for each, with its ranks, and the threads of each rank."""
    hosts = [[rank for rank in ranks if rank["places"][CPUS] == place] for place in {r["places"][CPUS] for r in ranks}]
    found = [
        {"cores": of[0]["cores"], "ranks": len(of), "threads": max(rank["threads"] for rank in of)} for of in hosts
    ]
    return max(found, key=lambda host: host["ranks"] * host["threads"] / host["cores"])


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


class EnergyUse:
    """Sums the millijoules of all ranks with the integers of each step. A watcher of the recorder.

    The event `energy` has the joules by kind since the start of this round. Rank 0 writes it every ten seconds and at
    the end. A counter that fails makes its kind unknown for this round: `failed` names it.

    `counters`: that this rank reads, by kind. `kinds`: that some rank reads. `event`: records an event; used on rank 0.
    """

    def __init__(
        self,
        comm: Comm,
        counters: Mapping[str, Counter],
        kinds: Sequence[str],
        event: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._comm, self._event, self._clock = comm, event, clock
        self._kinds = [kind for kind in KINDS if kind in kinds]
        self._meter = EnergyMeter(counters)
        self._sent_mj = dict.fromkeys(KINDS, 0)
        self._sum_mj = dict.fromkeys(self._kinds, 0)
        self._failed: set[str] = set()
        self._written_s, self._step = clock(), 0

    def values(self) -> list[int]:
        """Return the millijoules since the last call and whether the counter failed, for each kind."""
        used = self._meter.used_mj()
        found = []
        for kind in self._kinds:
            found += [used.get(kind, 0) - self._sent_mj[kind], int(kind in self._meter.failed)]
        self._sent_mj |= used
        return found

    def on_sums(self, step: int, sums: Sequence[int]) -> None:
        """Add the sums over ranks; on rank 0, write them every ten seconds."""
        self._add(sums)
        if self._clock() - self._written_s >= EVERY_S:
            self._write()

    def finish(self) -> None:
        """Read all counters once more, and write the sums of the round. Collective: yes."""
        if not self._kinds:
            return
        self._meter.read()
        summed = self._comm.allreduce(torch.tensor(self.values(), dtype=torch.int64), name="energy").wait()
        self._add(summed.tolist())
        self._write()

    def begin_step(self, step: int) -> None:
        """Note that step `step` begins."""
        self._step = step

    def close(self) -> None:
        """Stop reading the counters."""
        self._meter.close()

    def _add(self, sums: Sequence[int]) -> None:
        for kind, used_mj, failed in zip(self._kinds, sums[::2], sums[1::2], strict=True):
            self._sum_mj[kind] += used_mj
            self._failed |= {kind} if failed else set()

    def _write(self) -> None:
        self._written_s = self._clock()
        if self._comm.rank == 0 and self._kinds:
            joules = {kind: value / 1000 for kind, value in self._sum_mj.items() if kind not in self._failed}
            facts = {"failed": sorted(self._failed)} if self._failed else {}
            self._event({"event": "energy", "at_step": self._step, "joules": joules, **facts})


_BACKWARD = 2  # backward costs twice as much as forward: it computes gradients of inputs and of weights


@dataclass
class FirstPass(StepPart):
    """Counts the FLOPs of the first forward pass in training, without an extra pass.

    `event`: records the event ``flops``, once: ``per_sample``, FLOPs of training on a sample; ``device``;
    ``peak_per_s`` of all ranks together and ``peak_source``, None if unknown. It is not called if nothing could be
    counted.
    """

    config: Config  # precision, samples of a pass, and the peak if the user gives it
    device: torch.device  # of this rank
    size: int  # number of ranks
    event: Callable[[dict[str, Any]], None]
    same_samples: int  # number of ranks that have the same samples
    _is_counted: bool = field(default=False, init=False)

    def around_forward(self, batch: Any) -> AbstractContextManager[object] | None:  # noqa: D102
        return None if self._is_counted else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._is_counted = True
        with FlopCount() as count:
            yield
        if not count.flops:
            return
        device, config = self.device, self.config
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        own = config.observe.peak_tflops
        precision = config.precision.removesuffix("-weights")
        peak = (own, "--observe.peak_tflops") if own else peak_tflops(name, precision, tf32=allows_tf32())
        facts = {
            "per_sample": (1 + _BACKWARD) * count.flops * self.same_samples / config.train.micro_batch,
            "device": name,
            "peak_per_s": peak[0] * 1e12 * self.size if peak else None,
            "peak_source": peak[1] if peak else None,
        }
        self.event({"event": "flops", **facts})
