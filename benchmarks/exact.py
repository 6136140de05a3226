"""What do the same bits on any number of ranks cost (--train.reproducible bits), and how exact are their sums?

Jobs of 1 thread a rank take turns (see jobs.py), each with and without bits. `exact/MODEL/RANKS_over_fp32` is the
median over rounds of the ratio of steps; `exact/1gbit/...` is between two hosts of one core each over such a link.
`exact/MODEL/RANKS/verified_over_bits` is that ratio for --train.verify_every 12, to bits alone. `exact/error/...` is
the largest error of a sum of the gradients of 64 micro-batches, in the order of the tree and as autograd adds them,
over the sum of magnitudes, against float64.

`exact/hashes` counts the different hashes of parameters and optimizer after 300 steps of an elastic job on 1, 2, 3 and
4 ranks. Those of several ranks are struck by SIGKILL again and again, `exact/kills` times in all; each is followed by a
join.

`exact/flips/RANKS` counts steps in which one bit flips, of a gradient, an activation or (four ranks) a parameter. It
flips in a micro-batch that another rank repeats. `.../named` counts those whose rank is named in this step or the
next, `.../not_named` the rest, `.../others_named` alarms that name another rank. `.../hashes` counts the different
states at the end of the job with them and of one without: 1 says that no flip had an effect, so that those that are not
named were rounded away.
`exact/clean/alarms` counts alarms in as many checked steps without a flip. `exact/replayed` counts steps of 8 ranks
which `hvdtrain replay` repeats on one with the same bits, of `exact/replays`.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import Figure, figure, main, ratios
from engines import RATE, WARM_UP, step_s
from host_jobs import HostsJob
from jobs import Setting, race, take_turns, warmed_up
from soak import Soak, alone

from hvdtrain.data.tree import Counter
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.verify.replay import replay
from tests.support.chaos import ROOT, TASK
from tests.support.flips import CHECKED as ALL_CHECKED
from tests.support.flips import KINDS, Plan, anywhere, train_flipped
from tests.support.launch import ENVIRONMENT
from tests.support.two_hosts import two_hosts

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


def flips(size: int, steps: int, folder: Path) -> list[Figure]:
    """Flip a bit in each step but the last one, whose alarm would come in the next.

    Of two ranks it may not be known whose parameter is wrong; then training stops. So those are left out.
    """
    plan, runs = anywhere(size, KINDS[: 3 if size > 2 else 2]), {}
    plans: dict[str, Plan] = {"clean": lambda step: (-1, ""), "found": lambda s: plan(s) if s < steps else (-1, "")}
    for name, each in plans.items():
        runs[name] = train_flipped(folder / name, *ALL_CHECKED, size=size, steps=steps, plan=each)
    alarms = runs["found"].events("wrong_rank")
    wrong = {step: plan(step)[0] for step in range(1, steps)}
    named = {s for s, rank in wrong.items() for e in alarms if e["rank"] == rank and e["at_step"] in (s, s + 1)}
    others = [e for e in alarms if e["rank"] not in (wrong.get(e["at_step"]), wrong.get(e["at_step"] - 1))]
    counts = {
        "": len(wrong),
        "/named": len(named),
        "/not_named": len(wrong.keys() - named),
        "/others_named": len(others),
        "/hashes": len({state_hash(each.run) for each in runs.values()}),
    }
    return [figure(f"exact/flips/{size}_ranks{name}", [count], "") for name, count in counts.items()]


def clean(steps: int, folder: Path) -> list[Figure]:
    alarms = train_flipped(folder, *ALL_CHECKED, size=2, steps=steps).events("wrong_rank")
    return [figure("exact/clean", [steps], "steps"), figure("exact/clean/alarms", [len(alarms)], "")]


def replayed(count: int, folder: Path) -> list[Figure]:
    run, steps = folder / "run", 200
    own = ["--train.reproducible=bits", "--train.global_batch=32", f"--train.steps={steps}", f"--run_dir={run}"]
    saves = ["--checkpoint.every=10", "--checkpoint.keep=30"]
    command = [sys.executable, "-m", "hvdtrain", "launch", "-np", "8", "--", *TASK, *own, *saves]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True)
    equal = 0
    for step in random.Random(0).sample(range(1, steps + 1), count):
        with tempfile.TemporaryDirectory(dir=folder) as own_folder:
            equal += replay(run, step, Path(own_folder), lambda text: None).step is None
    return [figure("exact/replays", [count], ""), figure("exact/replayed", [equal], "")]


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
    with tempfile.TemporaryDirectory(prefix="exact-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        figures += clean(500 if quick else 20_000, folder / "clean")
        for size in (2, 4):
            figures += flips(size, 50 if quick else 501, folder / f"flips-{size}")
        figures += replayed(3 if quick else 50, folder)
    return [*figures, *hashes(quick), *between_hosts(quick)]


def between_hosts(quick: bool) -> list[Figure]:
    """The cost over a link, which needs root."""
    setting = SETTINGS["default/2_ranks"]
    both = {"fp32": setting, "bits": replace(setting, ours={**STOPPED, **BITS})}
    with two_hosts(rate=RATE) as hosts:
        jobs = {name: partial(HostsJob, name, "ours", each, hosts=hosts) for name, each in both.items()}
        found: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(1 if quick else 3):
            with warmed_up(jobs, WARM_UP) as running:
                for name, seconds in take_turns(running, step_s, 3).items():
                    found[name] += seconds
    return [figure(f"exact/{RATE}/default/2_ranks_over_fp32", ratios(found["bits"], found["fp32"]), "ratio")]


if __name__ == "__main__":
    main(__doc__, measure)
