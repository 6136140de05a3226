"""The device that a rank computes on, and torch's switches of the process: which kernels it may choose."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.comm.rounds import Rounds
from hvdtrain.errors import ConfigError, LaunchError
from hvdtrain.observe.monitor import gpu_identity, pci_address
from hvdtrain.runtime.environment import change_variables
from hvdtrain.runtime.host import (
    Binding,
    Seat,
    bind_to_gpus,
    cores_near,
    cpu_list,
    cpu_ranges,
    physical_cores,
    pin_process,
)
from hvdtrain.runtime.rules import THREADS
from hvdtrain.runtime.tuning import Choice, without_our_variables
from hvdtrain.state.train_state import Progress

_NEXT_STEP = "start fewer ranks a host, or use --parallel.device cpu; for a test: --parallel.device shared"
_SLOW = "NCCL does not support this, so gradients go through host memory, by MPI or Gloo; use it only for tests"

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def set_torch_threads(choices: Sequence[Choice]) -> None:
    """Set torch's number of threads, if torch was imported before its environment variable could be set."""
    for choice in choices:
        if choice.late and choice.setting.variable == THREADS:
            torch.set_num_threads(int(choice.setting.value))


def pick_device(wanted: str, local_rank: int, local_size: int, comm: Comm | None = None) -> torch.device:
    """Return the CPU, or the CUDA device of `local_rank`; if only one device is visible, that one.

    With ``shared``, ranks beyond the number of devices begin again at the first.

    A process keeps its device: its local rank may change later, when ranks join or leave. With `comm`, the call is
    collective, and only ranks that see the same devices are counted: a launcher may let each rank see those of its
    socket (``srun --gpu-bind=closest``). `wanted`: auto, cpu, cuda or shared.

    Errors: ConfigError: cuda was asked for, but there is no CUDA device; LaunchError: more ranks on this host than CUDA
    devices; or some ranks see devices and others none, on every rank.
    """
    if wanted != "cpu" and comm is not None and comm.size > 1:
        local_rank, local_size = _place_among_equals(comm)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"--parallel.device {wanted}, but torch finds no CUDA device",
            found=f"torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
            next_step="hvdtrain doctor shows torch's and the driver's versions",
        )
    count = torch.cuda.device_count()
    index = local_rank % count if wanted == "shared" else local_rank if count > 1 else 0
    if index >= count:
        raise LaunchError(
            "this host has more ranks than CUDA devices",
            expected=f"{count} rank(s) or fewer",
            found=f"{local_size}",
            next_step=_NEXT_STEP,
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _place_among_equals(comm: Comm) -> tuple[int, int]:
    """Return the place of this rank among those of its host that see the same devices, and their number."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]
    everyone = allgather_json(comm, [socket.gethostname(), uuids], name="visible devices")
    blind = [rank for rank, (_, seen) in enumerate(everyone) if not seen]
    if blind and len(blind) < comm.size:
        raise LaunchError(
            "some ranks see CUDA devices and others see none",
            expected="devices for all ranks, or --parallel.device cpu",
            found=f"none on rank {blind[0]} ({everyone[blind[0]][0]}), {len(blind)} of {comm.size} ranks",
            next_step="hvdtrain doctor on that host",
            everywhere=True,
        )
    equals = [rank for rank, seen in enumerate(everyone) if seen == everyone[comm.rank]]
    return equals.index(comm.rank), len(equals)


def bind_rank(
    wanted: str,
    device: torch.device,
    rounds: Rounds,
    comm: Comm | None,
    variables: Mapping[str, str],
    root: Path = Path("/"),
) -> Binding | None:
    """Pin this process to cores near its device (`runtime.host`), and fit torch's number of threads to them.

    Call it before loaders, pinned memory and threads are made. It stays bound, also in a later training. Returns None
    if it is not to be bound. With `comm`, the call is collective, and ranks that the launcher bound to different cores
    are recognized. `wanted`: auto, gpu or none. `root`: root folder of ``sys``.

    Errors: ConfigError: gpu was asked for, but the device is a CPU.
    """
    gpu = gpu_identity(device)
    if wanted == "gpu" and gpu is None:
        raise ConfigError(
            "--parallel.bind gpu, but this rank trains on a CPU",
            expected="a GPU",
            next_step="let the launcher bind it: mpirun --bind-to numa, or srun --cpu-bind=ldoms",
        )
    if wanted == "none" or gpu is None:
        return None
    address = pci_address(gpu)
    near = cores_near(address, root / "sys") if address else frozenset[int]()
    place, seats = _seats(Seat(frozenset(os.sched_getaffinity(0)), near), rounds, comm)
    planned = bind_to_gpus(seats, insist=wanted == "gpu")
    mine = planned[place]
    if not mine.kept:
        pin_process(mine.cpus)
        most = len(mine.cpus)
        if THREADS not in without_our_variables(variables):
            most = max(1, physical_cores(root, mine.cpus) // planned.count(mine))
        torch.set_num_threads(min(torch.get_num_threads(), most))
    return replace(mine, gpu=address)


def _seats(own: Seat, rounds: Rounds, comm: Comm | None) -> tuple[int, list[Seat]]:
    """Return the place of this rank among those of its host, and the cores of each; without a comm, all as its own."""
    if comm is not None:
        mine = [socket.gethostname(), cpu_ranges(own.allowed), cpu_ranges(own.near)]
        everyone = allgather_json(comm, mine, name="cores")
        here = [rank for rank, (host, *_) in enumerate(everyone) if host == mine[0]]
        if len(here) == rounds.local_size:  # else different hosts have the same name
            return here.index(comm.rank), [Seat(*map(cpu_list, everyone[rank][1:])) for rank in here]
    return rounds.local_rank, [own] * rounds.local_size


@contextmanager
def training_stream(device: torch.device) -> Iterator[None]:
    """Run a block on a CUDA stream that is not the default one; on the CPU do nothing.

    Horovod's background thread makes the output of an alltoall or allgather on the default stream, and waits until that
    stream has done its work. Training on it would make these exchanges wait for backward.
    """
    if device.type != "cuda":
        yield
        return
    before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(before)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        with suppress(RuntimeError):  # after a fault of the device: its first error is the one to show
            before.wait_stream(own)


def check_device_is_own(device: torch.device, comm: Comm, *, may_share: bool = False) -> str:
    """Check that no two ranks share a device; NCCL does not support it. Collective: yes.

    If they share one and `may_share`, tensors go through host memory, and it returns a warning.

    Errors: LaunchError: two ranks do, and may not, on every rank.
    """
    if device.type != "cuda":
        return ""
    mine = [socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)]
    everyone = allgather_json(comm, mine, name="devices")
    for rank, theirs in enumerate(everyone):
        first = everyone.index(theirs)
        if first != rank and may_share:
            setattr(comm, "through_host", True)  # noqa: B010  (a comm of several ranks is a HorovodComm)
            return f"ranks {first} and {rank} share a CUDA device of {theirs[0]}: {_SLOW}"
        if first != rank:
            raise LaunchError(
                f"ranks {first} and {rank} would share a CUDA device of {theirs[0]}",
                expected="one device for each rank",
                next_step=_NEXT_STEP,
                everywhere=True,
            )
    return ""


def use_deterministic_kernels(variables: Mapping[str, str]) -> None:
    """Have torch use deterministic kernels only, and refuse operations that have none.

    Call it before CUDA starts: cuBLAS reads its variable then. `variables` is the environment of this process; a
    workspace that is set there is kept. torch also fills new memory that it does not write, and Inductor does not
    choose kernels by measuring them.
    """
    change_variables({_WORKSPACE: variables.get(_WORKSPACE, ":4096:8")})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would measure convolutions, and choose others in each process


def set_tf32(choice: str, device: torch.device) -> None:
    """Allow or forbid TF32 in matrix products, convolutions and recurrent modules; auto changes nothing.

    On CPUs nothing changes: there, the same switch of torch would let some of them round matrix products.

    The newer `fp32_precision` of torch is not used: after it, torch raises an error where its own compiler reads the
    older switches. These set the newer ones, too.
    """
    if choice == "auto" or device.type != "cuda":
        return
    torch.set_float32_matmul_precision("high" if choice == "on" else "highest")
    torch.backends.cudnn.allow_tf32 = choice == "on"


def allows_tf32() -> bool:
    """Return whether matrix products may use TF32, by whichever of torch's switches."""
    products = torch.backends.cuda.matmul
    newer = getattr(products, "fp32_precision", None)  # since torch 2.9; then the older one may raise an error
    return bool(products.allow_tf32) if newer is None else newer == "tf32"


def fix_threads(progress: Progress, variables: Mapping[str, str], comm: Comm) -> None:
    """Give torch the number of threads of the run's first start; there, OMP_NUM_THREADS of the user, or 1.

    Collective: yes. Errors: LaunchError: a rank was started with another number; on every rank.
    """
    value = without_our_variables(variables).get(THREADS, "").split(",")[0].strip()
    given = allgather_json(comm, int(value) if value.isdigit() else 0, name="same_bits/threads")
    threads = progress.threads or given[0] or 1
    for rank, other in enumerate(given):
        if other not in (0, threads) or (not progress.threads and other != given[0]):
            raise LaunchError(
                f"--train.reproducible bits, but rank {rank} was started with {THREADS}={other}",
                expected=f"{THREADS}={threads}, as " + ("since the first start" if progress.threads else "on rank 0"),
                next_step=f"unset {THREADS}, or set it to {threads} on every host"
                + ("; for another number: a new run" if progress.threads else ""),
                everywhere=True,
            )
    progress.threads = threads
    torch.set_num_threads(threads)
