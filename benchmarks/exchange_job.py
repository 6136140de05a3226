"""One contender of exchange.py: ``mpirun ... python exchange_job.py CONTENDER FILE CASE...``.

Rank 0 writes FILE: the median milliseconds of each case as JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SIZES = {"4B": 4, "4KiB": 4 << 10, "64KiB": 64 << 10, "256KiB": 256 << 10, "1MiB": 1 << 20, "8MiB": 8 << 20}
FLAT = "32MiB"
SIZES |= {FLAT: 32 << 20, "256MiB": 256 << 20}
SMALL, MODEL = "1024x32KiB", "llama15m"
BUDGET_S, MOST, WARM_UP = 0.5, 200, 3
Once = Callable[[], float]


def median_ms(once: Once, together: Callable[[], None], agreed: Callable[[float], float]) -> float:
    """Repeat for about half a second, the same number of times on each rank; `once` gives seconds."""
    warm = [(together(), once())[1] for _ in range(WARM_UP)]
    repeats = max(5, min(MOST, int(BUDGET_S / agreed(min(warm)))))
    seconds = []
    for _ in range(repeats):
        together()
        seconds.append(once())
    return 1e3 * statistics.median(seconds)


def timed(work: Callable[[], Any]) -> Once:
    """Seconds that `work` takes."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return once


def shapes(case: str) -> list[Sequence[int]]:
    if case == SMALL:
        return [(8192,)] * 1024
    import torch
    from models import llama15m

    with torch.device("meta"):
        return [tuple(p.shape) for p in llama15m().model.parameters()]


def ours() -> tuple[Callable[[str], Once], Callable[[], None], Callable[[float], float]]:
    """Our communicator, and our reducer for many tensors."""
    from hvdtrain.runtime import tuning

    info, _ = tuning.prepare()
    import torch

    from hvdtrain.comm.rounds import start_comm
    from hvdtrain.exchange.reducer import Reducer

    torch.set_num_threads(1)
    comm = start_comm(info)

    def case(name: str) -> Once:
        if name in SIZES:
            tensor = torch.zeros(SIZES[name] // 4)
            return timed(lambda: comm.allreduce(tensor, name=name).wait())
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes(name)]
        named = [(str(number), p) for number, p in enumerate(parameters)]
        reducer = Reducer(lambda: named, comm, name=name)

        def once() -> float:
            reducer.begin()
            reducer.collect()
            for p in parameters:
                p.grad = None
            torch.stack([p.sum() for p in parameters[1:]]).sum().backward()
            last = parameters[0].sum()
            comm.barrier()
            start = time.perf_counter()
            last.backward()
            reducer.finish()
            return time.perf_counter() - start

        return once

    def agreed(value: float) -> float:
        return float(comm.allreduce(torch.tensor([value]), name="agreed").wait()) / comm.size

    return case, comm.barrier, agreed


def stock() -> tuple[Callable[[str], Once], Callable[[], None], Callable[[float], float]]:
    """Horovod as it comes."""
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    hvd.init()

    def case(name: str) -> Once:
        if name in SIZES:
            tensor = torch.zeros(SIZES[name] // 4)
            return timed(lambda: hvd.synchronize(hvd.allreduce_async_(tensor, name=name)))
        tensors = [torch.zeros(shape) for shape in shapes(name)]

        def work() -> None:
            handles = [hvd.allreduce_async_(tensor, name=f"{name}/{n}") for n, tensor in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)

        return timed(work)

    return case, hvd.barrier, lambda value: float(hvd.allreduce(torch.tensor([value]), name="agreed"))


def gloo() -> tuple[Callable[[str], Once], Callable[[], None], Callable[[float], float]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getppid() % 20000)}
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    atexit.register(dist.destroy_process_group)  # else its threads may abort the process in the end

    def case(name: str) -> Once:
        tensors = [torch.zeros(SIZES[name] // 4)] if name in SIZES else [torch.zeros(shape) for shape in shapes(name)]

        def work() -> None:
            for under_way in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                under_way.wait()

        return timed(work)

    def agreed(value: float) -> float:
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return float(tensor) / size

    return case, dist.barrier, agreed


def mpi() -> tuple[Callable[[str], Once], Callable[[], None], Callable[[float], float]]:
    """mpi4py, tensor by tensor; `limit/CASE`: memory alone."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def case(name: str) -> Once:
        kind, _, name = name.rpartition("/")
        if kind:
            mine, other = np.zeros(SIZES[name] // 4, np.float32), np.ones(SIZES[name] // 4, np.float32)

            def memory() -> None:
                if world.rank == 0:
                    np.copyto(mine, other)
                    np.add(mine, other, out=mine)

            return timed(memory)
        arrays = [np.zeros(shape, np.float32) for shape in ([(SIZES[name] // 4,)] if name in SIZES else shapes(name))]
        return timed(lambda: [world.Allreduce(MPI.IN_PLACE, array) for array in arrays])

    return case, world.Barrier, lambda value: float(world.allreduce(value)) / world.size


def main() -> None:
    contender, file, *cases = sys.argv[1:]
    case, together, agreed = {"ours": ours, "stock": stock, "gloo": gloo, "mpi": mpi}[contender]()
    if contender == "mpi":
        cases += [f"limit/{name}" for name in cases if name in SIZES]
    found = {name: median_ms(case(name), together, agreed) for name in cases}
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        Path(file).write_text(json.dumps(found))
    together()


if __name__ == "__main__":
    main()
