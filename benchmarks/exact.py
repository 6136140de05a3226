"""What do the same bits on any number of ranks cost (--train.reproducible bits), and how exact are their sums?

Jobs of 1 thread a rank take turns (see jobs.py), each with and without bits. `exact/MODEL/RANKS_over_fp32` is the
median over rounds of the ratio of steps; `exact/error/...` the largest error of a sum of the gradients of 64
micro-batches, in the order of the tree and as autograd adds them, over the sum of magnitudes, against float64.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from common import Figure, figure, main, ratios
from engines import WARM_UP, step_s
from jobs import Setting, race

from hvdtrain.data.tree import Counter

BITS = {"train.reproducible": "bits"}
STOPPED = {"observe.stall_timeout_s": 0}  # jobs are stopped between turns
LLAMA = Setting("llama15m", 4, passes=4, ours=STOPPED)
SETTINGS = {
    "default/1_rank": Setting("default", 2, passes=8, ranks=1, ours=STOPPED),
    "default/2_ranks": Setting("default", 2, passes=4, ours=STOPPED),
    "llama/2_ranks": LLAMA,
    "llama/2_ranks_zero1": replace(LLAMA, ours={**STOPPED, "parallel.shard": "optimizer"}),
}


def errors(count: int = 64) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1 << 16, generator=generator) + 0.1 for _ in range(count)]
    exact, magnitudes = (torch.stack(each).double().sum(0) for each in (leaves, [leaf.abs() for leaf in leaves]))
    tree = Counter[torch.Tensor](count, torch.add)
    total = torch.zeros_like(leaves[0])
    for position, leaf in enumerate(leaves):
        tree.add((position, 0), leaf)
        total += leaf
    sums = {"tree": tree.parts[0][1], "one_by_one": total}
    return {name: ((found.double() - exact).abs() / magnitudes).max().item() for name, found in sums.items()}


def measure(quick: bool) -> list[Figure]:
    figures = [figure(f"exact/error/{name}", [error], "of magnitudes") for name, error in errors().items()]
    for name, setting in list(SETTINGS.items())[: 2 if quick else None]:
        both = {"fp32": setting, "bits": replace(setting, ours={**setting.ours, **BITS})}
        starts, rounds = (1, 3) if quick else (3, 3)
        found = race(list(both), both, step_s, rounds=rounds, warm_up=WARM_UP, starts=starts)
        figures.append(figure(f"exact/{name}_over_fp32", ratios(found["bits"], found["fp32"]), "ratio"))
        figures += [figure(f"exact/{name}/{each}", [1e3 * s for s in found[each]], "ms") for each in both]
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
