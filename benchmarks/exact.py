"""What do the same bits on any number of ranks cost (--train.reproducible bits), and how exact are their sums?

Jobs of 1 thread a rank take turns (see jobs.py), each with and without bits. `exact/MODEL/RANKS_over_fp32` is the
median over rounds of the ratio of steps. `exact/MODEL/RANKS/verified_over_bits` is that ratio for --train.verify_every
12, to bits alone. `exact/error/...` is the largest error of a sum of the gradients of 64 micro-batches, in the order of
the tree and as autograd adds them, over the sum of magnitudes, against float64.

`exact/hashes` counts the different hashes of parameters and optimizer after 300 steps of an elastic job on 1, 2, 3 and
4 ranks. Those of several ranks are struck by SIGKILL again and again, `exact/kills` times in all; each is followed by a
join.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from common import Figure, figure, main, ratios
from engines import WARM_UP, step_s
from jobs import Setting, race
from soak import Soak, alone

from hvdtrain.data.tree import Counter
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from tests.support.chaos import TASK

BITS = {"train.reproducible": "bits"}
STOPPED = {"observe.stall_timeout_s": 0}  # jobs are stopped between turns
LLAMA = Setting("llama15m", 4, passes=4, ours=STOPPED)
SETTINGS = {
    "default/1_rank": Setting("default", 2, passes=8, ranks=1, ours=STOPPED),
    "default/2_ranks": Setting("default", 2, passes=4, ours=STOPPED),
    "llama/2_ranks": LLAMA,
    "llama/2_ranks_zero1": replace(LLAMA, ours={**STOPPED, "parallel.shard": "optimizer"}),
}


CHECKED = {"train.verify_every": 12}
KILLED = [*TASK, "--train.steps=300", "--checkpoint.every=100", "--train.reproducible=bits"]


def hashes(quick: bool) -> list[Figure]:
    """Train on several numbers of ranks that are struck, and compare."""
    found, kills = set(), 0
    with tempfile.TemporaryDirectory(prefix="exact-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        alone(folder, KILLED)
        found.add(state_hash(folder / "alone"))
        for ranks in (3,) if quick else (2, 3, 4):
            (own := folder / str(ranks)).mkdir()
            soak = Soak(own, KILLED, ranks, ranks=ranks, gap_s=4.0, pace_s=0.2, signals=("SIGKILL",))
            if code := soak.train(600):
                raise RuntimeError(f"{ranks} ranks: exit code {code}: {(own / 'said').read_text()[-2000:]}")
            kills += len(soak.strikes)
            found.add(state_hash(soak.run))
    return [figure("exact/hashes", [len(found)], ""), figure("exact/kills", [kills], "")]


def state_hash(run: Path) -> str:
    """SHA-256 of all parameters and the optimizer's state in the newest checkpoint."""
    newest = CheckpointStore(RunLayout(run).checkpoints, print).list()[-1]
    made = hashlib.sha256()
    for group in ("model", "optimizer"):
        for name, tensor in sorted(load(newest.path).tensors[group].items()):
            made.update(f"{group}/{name}".encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


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
    bits = replace(SETTINGS["default/2_ranks"], ours={**STOPPED, **BITS})
    both = {"bits": bits, "verified": replace(bits, ours={**bits.ours, **CHECKED})}
    starts, rounds = (1, 3) if quick else (3, 3)
    found = race(list(both), both, step_s, rounds=rounds, warm_up=WARM_UP, starts=starts)
    figures.append(
        figure("exact/default/2_ranks/verified_over_bits", ratios(found["verified"], found["bits"]), "ratio")
    )
    return [*figures, *hashes(quick)]


if __name__ == "__main__":
    main(__doc__, measure)
