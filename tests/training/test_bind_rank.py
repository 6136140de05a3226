"""A rank pins itself, its threads and its loaders; GPUs and machines are made up, one process really pins itself."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvdtrain.comm.base import Comm
from hvdtrain.errors import ConfigError
from hvdtrain.observe.monitor import GpuIdentity
from hvdtrain.runtime.host import Binding, cpu_list, cpu_ranges
from hvdtrain.runtime.rules import THREADS
from hvdtrain.runtime.tuning import RECORD
from hvdtrain.training.start import device
from hvdtrain.training.start.device import bind_rank
from tests.support.launch import ROOT, run
from tests.support.sysfs import DGX_GPUS, SOCKETS, dgx_h100
from tests.support.thread_comm import on_ranks

CPU = torch.device("cpu")


class Host:
    """A made-up host. Each rank has what it may use, and notes to which cores it pins itself, and its threads.

    Attributes:
        root: of its file system.
        allowed: cores that a rank may use, by rank; the last one is that of all others.
        gpus: address of each rank's GPU; empty if ranks are on CPUs.
        variables: of all ranks.
        local_size: as the launcher counts it; None for all ranks.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.gpus: Sequence[str] = ()
        self.allowed: Sequence[str] = ("0-223",)
        self.variables: dict[str, str] = {}
        self.local_size: int | None = None
        self._own = own = threading.local()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(own.allowed))
        monkeypatch.setattr(device, "gpu_identity", lambda device: own.gpu)
        monkeypatch.setattr(device, "pin_process", lambda cpus: setattr(own, "cores", cpu_ranges(cpus)))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 28)
        monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(own, "threads", number))

    def bind(self, wanted: str, size: int, *, elastic: bool = False) -> list[tuple[str, int, Binding | None]]:
        """Return for each rank the cores it pinned itself to, its threads, and its binding."""

        def one(comm: Comm) -> tuple[str, int, Binding | None]:
            own = self._own
            own.allowed = cpu_list(self.allowed[min(comm.rank, len(self.allowed) - 1)])
            own.gpu = GpuIdentity(0, "", self.gpus[comm.rank].upper()) if self.gpus else None
            own.cores, own.threads = "", 28
            rounds: Any = SimpleNamespace(local_rank=comm.rank, local_size=self.local_size or comm.size)
            binding = bind_rank(wanted, CPU, rounds, None if elastic else comm, self.variables, self.root)
            return own.cores, own.threads, binding

        return on_ranks(size, one)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    return Host(monkeypatch, tmp_path)


@pytest.mark.parametrize("wanted", ["auto", "gpu"])
@pytest.mark.parametrize("elastic", [False, True])
def test_gpu_ranks_are_pinned_to_their_socket(wanted: str, elastic: bool, host: Host) -> None:
    host.root, host.gpus = dgx_h100(host.root), DGX_GPUS
    found = host.bind(wanted, 8, elastic=elastic)
    assert [cores for cores, _, _ in found] == [SOCKETS[0]] * 4 + [SOCKETS[1]] * 4
    assert found[5][2] == Binding(cpu_list(SOCKETS[1]), DGX_GPUS[5].upper())


def test_threads_are_a_share_of_the_cores_of_the_domain(host: Host) -> None:
    """Six ranks: of a socket, which has 56 cores of two threads, four have 14 each, and two 28."""
    host.root, host.gpus = dgx_h100(host.root), DGX_GPUS[:6]
    for cpu in range(224):
        file = host.root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpu % 112},{cpu % 112 + 112}\n")
    assert [threads for _, threads, _ in host.bind("auto", 6)] == [14] * 4 + [28] * 2


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, 8), ({THREADS: "28"}, 16), ({THREADS: "28", RECORD: json.dumps({THREADS: "28"})}, 8)],
    ids=["none", "the user's", "ours"],
)
def test_the_users_threads_are_kept_up_to_the_cores(variables: dict[str, str], threads: int, host: Host) -> None:
    host.root, host.gpus, host.variables = dgx_h100(host.root), DGX_GPUS[:2], variables
    host.allowed = ["40-71"]
    assert host.bind("auto", 2)[0][:2] == ("40-55", threads)


@pytest.mark.parametrize(
    ("gpu", "allowed", "expected", "kept"),
    [
        (DGX_GPUS[0], "0-223", SOCKETS[0], ""),
        (DGX_GPUS[4], "0-15", "", "none of the cores near their GPUs (56-111,168-223)"),
        # An older torch does not report the address, and the first one of the bus is a device of the first socket.
        ("0000:00:00.0", "0-223", "", "does not list"),
    ],
    ids=["near", "far", "the bridge"],
)
def test_a_rank_is_pinned_near_its_gpu_or_not_at_all(
    gpu: str, allowed: str, expected: str, kept: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are never more threads than before."""
    host.root, host.gpus, host.allowed = dgx_h100(host.root), [gpu], [allowed]
    monkeypatch.setattr("hvdtrain.observe.monitor.open_nvml", lambda gpu: (None, None))
    ((cores, threads, binding),) = host.bind("auto", 1)
    assert (cores, threads) == (expected, 28)
    assert binding is not None and (kept in binding.kept if kept else not binding.kept)


def test_hosts_of_the_same_name_are_not_one_host(host: Host) -> None:
    """Four ranks near the same 56 cores, of eight that the launcher counts on each host."""
    host.root, host.gpus, host.local_size = dgx_h100(host.root), DGX_GPUS[:4], 8
    assert {threads for _, threads, _ in host.bind("auto", 4)} == {14}


@pytest.mark.parametrize(("wanted", "gpus"), [("auto", ()), ("none", ()), ("none", DGX_GPUS)])
def test_nothing_is_bound(wanted: str, gpus: Sequence[str], host: Host) -> None:
    host.root, host.gpus = dgx_h100(host.root), gpus
    assert host.bind(wanted, 2) == [("", 28, None)] * 2


def test_cores_near_a_gpu_need_one(host: Host) -> None:
    with pytest.raises(ConfigError, match=r"--parallel.bind gpu(?s:.*)--bind-to numa"):
        host.bind("gpu", 1)


PROGRAM = """
import json, multiprocessing, os, sys, threading
from hvdtrain.runtime.host import pin_process

def mask(thread=0):
    return sorted(os.sched_getaffinity(thread))

def put(queue):
    queue.put(mask())

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    queue, go, seen = context.SimpleQueue(), threading.Event(), {}

    def child():
        process = context.Process(target=put, args=(queue,))
        process.start()
        process.join()
        return queue.get()

    wide = child()  # the fork server has begun with the wide mask
    early = threading.Thread(target=lambda: (go.wait(), seen.update({"early thread": mask()})))
    early.start()
    other = threading.Thread(target=go.wait)
    other.start()
    os.sched_setaffinity(other.native_id, wide[:1])
    pin_process(frozenset(wide[1:]))
    late = threading.Thread(target=lambda: seen.update({"late thread": mask()}))
    late.start()
    seen |= {"child": child(), "process": mask(), "bound elsewhere": mask(other.native_id)}
    go.set()
    for thread in (early, late):
        thread.join()
    print(json.dumps(seen))
"""


def test_a_process_pins_its_threads_and_its_children(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("this process may use one core only")
    (tmp_path / "pins.py").write_text(PROGRAM)
    done = run([str(tmp_path / "pins.py")], cwd=tmp_path, environment={"PYTHONPATH": str(ROOT)}, forks=False)
    expected = dict.fromkeys(("early thread", "late thread", "child", "process"), usable[1:])
    assert json.loads(done.stdout) == {**expected, "bound elsewhere": usable[:1]}
