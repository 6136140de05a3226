"""What does a compressor cost where nothing travels, and does PowerSGD approximate as torch's does?

Speed: gradients of a Llama of 15 million parameters in buckets of 8 MiB (on a GPU of 342 million in buckets of 64 MiB)
go through pack, exchange and commit on one rank, each compressor in turn with a copy of the same gradients: GB/s of
gradient, and over those of the copy. One rank takes all parts: it owns, so sums and codes again, everything, and what
it gathers is a copy in new memory.

Numerics: two processes joined by gloo sum a fixed set of matrices, step after step, by our PowerSGD and by torch's hook
for DDP, both with error feedback, from the same first guess.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import Figure, figure, main, ratios
from torch import Tensor, nn

from hvdtrain.comm.solo import Finished, SoloComm
from hvdtrain.compression.base import BucketShape, Compressor, Part, commit_all
from hvdtrain.compression.table import TABLE, parse
from hvdtrain.exchange.buckets import assign_buckets, lay_out
from tests.support.compression import drive

NAMES = (*TABLE, "powersgd:2", "topk:0.001")
WORDS = 8192
SIZES = {"cpu": (320, 864, 8, 8 << 20), "cuda": (2048, 5632, 6, 64 << 20)}
"""By type of the device: width, inner width and number of layers, and the size of buckets."""
RANK, STEPS = 4, 20


def llama(hidden: int, inner: int, layers: int) -> list[tuple[int, ...]]:
    """Shapes of the gradients, in the order in which backward makes them."""
    layer = [(hidden,), (hidden, inner), (inner, hidden), (inner, hidden), (hidden,), *[(hidden, hidden)] * 4]
    return [(WORDS, hidden), (hidden,), *layer * layers, (WORDS, hidden)]


def buckets(shapes: Sequence[tuple[int, ...]], device: torch.device, limit: int) -> list[BucketShape]:
    named = [(f"p{index}", nn.Parameter(torch.empty(shape, device=device))) for index, shape in enumerate(shapes)]
    agreed = assign_buckets(named, limit, finished=[name for name, _ in named])
    return [layout.shape for layout in lay_out(agreed, dict(named), "bucket")]


def exchange(compressor: Compressor, out: Tensor, gradients: Sequence[Tensor], weight: float = 0.5) -> None:
    """One exchange, as a reducer does it."""
    for index, gradient in enumerate(gradients):
        compressor.pack(index, gradient, weight)
    drive(compressor, out)


def seconds(action: Callable[[], object], device: torch.device, times: int) -> float:
    found = []
    for _ in range(times):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def speed(device: torch.device, quick: bool) -> list[Figure]:
    *size, limit = SIZES["cpu" if quick else device.type]
    shapes = buckets(llama(*size), device, limit)
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=generator).to(device) for p in shape.parts] for shape in shapes]
    outs, copies = [shape.zeros() for shape in shapes], [[torch.zeros_like(g) for g in gs] for gs in gradients]
    size_bytes = sum(4 * shape.length for shape in shapes)
    where = "" if device.type == "cpu" else f"{device.type}/"

    def copy() -> None:
        for to, what in zip(copies, gradients, strict=True):
            for a, b in zip(to, what, strict=True):
                a.copy_(b)

    def step(compressors: Sequence[Compressor]) -> None:
        for compressor, out, values in zip(compressors, outs, gradients, strict=True):
            exchange(compressor, out, values)
        for compressor in compressors:
            commit_all([compressor], applied=True)

    figures = []
    for name in NAMES:
        made = [parse(name).load()(shape, SoloComm()) for shape in shapes]
        for _ in range(3):
            step(made)
        mine, theirs = [], []
        for _ in range(3 if quick else 9):
            mine.append(seconds(lambda: step(made), device, 5))  # noqa: B023
            theirs.append(seconds(copy, device, 5))
        label = name.replace(":", "_")
        figures.append(figure(f"compressors/{where}{label}_GBps", [size_bytes / s / 1e9 for s in mine], "GB/s"))
        figures.append(figure(f"compressors/{where}{label}_GBps_vs_memcpy", ratios(theirs, mine), "ratio"))
    return figures


class Gloo:
    """As much of a Comm as PowerSGD asks for."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:
        """Sum in place; returns when it is done."""
        dist.all_reduce(tensor)
        return Finished(tensor)


def matrices(rank: int) -> list[Tensor]:
    """With singular values that fall off as those of gradients do; what all ranks share, and noise of each."""
    found = []
    for index, (m, n) in enumerate([(320, 320)] * 4 + [(864, 320)] * 2 + [(320, 864)]):
        shared, own = torch.Generator().manual_seed(index), torch.Generator().manual_seed(1000 * (rank + 1) + index)
        left, right = torch.randn(m, 40, generator=shared), torch.randn(40, n, generator=shared)
        fall = 0.7 ** torch.arange(40.0)
        found.append((left * fall) @ right / 20 + 0.01 * torch.randn(m, n, generator=own))
    return found


def error(found: Tensor, rank_sum: Tensor) -> float:
    return float((found - rank_sum).norm() / rank_sum.norm())


def compare(rank: int, port: int, answers: Any) -> None:
    """One of two processes: relative errors of the approximated mean and seconds, ours and torch's, step by step."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mine = matrices(rank)
    mean = sum(torch.cat([m.flatten() for m in matrices(r)]) for r in range(2)) / 2
    (shape,) = buckets([tuple(m.shape) for m in mine], torch.device("cpu"), limit=1 << 40)
    ours = parse(f"powersgd:{RANK}").load()(shape, Gloo())  # type: ignore[arg-type]
    state = theirs.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, random_seed=7)
    state.iter = 2
    ours.load_state_dict(first_guess(state, shape), 2)
    out = shape.zeros()
    rows = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        exchange(ours, out, mine, weight=0.5)
        commit_all([ours], applied=True)
        between = time.perf_counter()
        flat = torch.cat([m.flatten() for m in mine])
        pieces = [p.view(m.shape) for p, m in zip(flat.split([m.numel() for m in mine]), mine, strict=True)]
        bucket = SimpleNamespace(
            index=lambda: 0,
            buffer=lambda: flat,  # noqa: B023
            gradients=lambda: pieces,  # noqa: B023
            parameters=lambda: mine,
            is_last=lambda: True,
        )
        dist.barrier()
        middle = time.perf_counter()
        result = theirs.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]
        end = time.perf_counter()
        rows.append((error(out, mean), error(result, mean), between - start, end - middle))
    if rank == 0:
        answers.put(rows)
    # The hook's futures would end gloo's threads from within one of them.
    del state, result, bucket
    dist.barrier()
    dist.destroy_process_group()


def first_guess(state: Any, shape: BucketShape) -> dict[str, Tensor]:
    """What torch's hook is going to start from, as a state of ours; leaves the hook's own draws as they were."""
    import copy

    torch.manual_seed(copy.deepcopy(state.rng).randint(1_000_000_000))
    batches: dict[torch.Size, list[Part]] = {}
    for part in shape.parts:
        batches.setdefault(part.shape, []).append(part)
    found = {}
    for sides, parts in batches.items():
        for part, q in zip(parts, torch.randn(len(parts), sides[1], RANK), strict=True):
            found[f"{part.name}/powersgd_q"] = q.mT
    return found


def numerics() -> list[Figure]:
    """Errors in the first step and the last, and how long each takes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [context.Process(target=compare, args=(rank, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes), "a process failed"
    ours, theirs, our_s, their_s = zip(*answers.get(), strict=True)
    return [
        figure("compressors/powersgd_error_first_step", ours[:1], "relative"),
        figure("compressors/powersgd_error_first_step_torch", theirs[:1], "relative"),
        figure("compressors/powersgd_error_last_step", ours[-1:], "relative"),
        figure("compressors/powersgd_error_last_step_torch", theirs[-1:], "relative"),
        figure("compressors/powersgd_error_vs_torch", ratios(ours, theirs), "ratio"),
        figure("compressors/powersgd_s_vs_torch", ratios(our_s[3:], their_s[3:]), "ratio"),
    ]


def measure(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    figures = speed(torch.device("cpu"), quick)
    if torch.cuda.is_available():
        figures += speed(torch.device("cuda"), quick)
    return figures + numerics()


if __name__ == "__main__":
    main(__doc__, measure)
