"""How many bytes of optimizer state and gradients does a rank hold, and how much memory has it at most?

2 and 4 ranks of 1 thread, a Llama, AdamW, clipping; one job runs at a time. `..._mib` is the largest count of a step:
all live tensors but parameters, buffers, inputs and activations, so optimizer state, gradients and the memory of their
exchange, at the worst of all moments that `live_bytes.py` sees in the first steps. `zero2_state` is that of `shard
gradients` over that of the default. `resident` is the peak resident set of a later step, with all libraries. Of the
ranks, the one with most counts. DDP's buckets cannot be counted, so `ddp_zero` has only its resident set. Peers that
are not installed are left out (peer_packages.py).

--model llama60m has 60 million parameters instead of 15: buckets that are exchanged are a smaller share of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from activation_bytes import measure_checkpointing
from common import Figure, figure, options, ratios, report
from engines import CONSTANT, OURS, contenders
from jobs import Job, Setting
from peer_packages import use_packages

MODELS = ("llama15m", "llama60m")
SIZES = (2, 4)
CONTENDERS = ("replicated", "zero1", "zero2", "ddp_zero", "deepspeed_zero2")
QUICK = ("replicated", "zero2")
COUNTS = ("replicated", "zero1", "zero2", "deepspeed_zero2")
MIB = 1 << 20


def start(name: str, size: int, model: str, folder: Path) -> Job:
    setting = partial(Setting, micro_batch=4, ranks=size, optimizer=CONSTANT)
    if name not in OURS:
        return Job(f"memory_job:{name}", setting(model), folder)
    watched = {"folder": str(folder), "model": model}
    return Job("ours", setting("memory_job:watched", arguments=watched, ours=OURS[name]), folder)


def rank_results(name: str, size: int, model: str) -> list[dict[str, Any]]:
    """Return what each rank of one job has measured."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = [folder / f"{rank}.json" for rank in range(size)]
        job = start(name, size, model, folder)
        try:
            job.until(lambda _: all(file.exists() for file in files))
        finally:
            job.end()
        return [json.loads(file.read_text()) for file in files]


def show(name: str, size: int, ranks: list[dict[str, Any]]) -> None:
    """Print where the worst rank has its peaks."""
    worst = max(ranks, key=lambda rank: max(peak["total"] for peak in rank["peaks"]))
    for step, peak in enumerate(worst["peaks"], 1):
        parts = ", ".join(f"{part} {peak[part] / MIB:.1f}" for part in ("total", "state", "gradients"))
        largest = " ".join(f"{bytes_ / MIB:.1f}" for bytes_ in peak["sizes"])
        print(f"{name}, {size} ranks, step {step}: MiB {parts}; {peak['moment']}; largest {largest}", file=sys.stderr)


def measure_size(size: int, model: str, names: list[str], starts: int) -> list[Figure]:
    counted: dict[str, list[float]] = {name: [] for name in names}
    resident: dict[str, list[float]] = {name: [] for name in names}
    for number in range(starts):
        for name in names:
            ranks = rank_results(name, size, model)
            if number == 0 and name in COUNTS:
                show(name, size, ranks)
            counted[name].append(max(peak["total"] / MIB for rank in ranks for peak in rank["peaks"]))
            resident[name].append(max(rank["resident_mib"] for rank in ranks))
    over = f"{size}_ranks" + ("" if model == MODELS[0] else f"/{model}")
    found = []
    for name in [n for n in names if n in COUNTS]:
        if name != "replicated" and "replicated" in names:
            shares = ratios(counted[name], counted["replicated"])
            found.append(figure(f"memory/{name}_state/{over}", shares, "ratio"))
        found.append(figure(f"memory/{name}_mib/{over}", counted[name], "MiB"))
    for name in names:
        if name != "zero2" and "zero2" in names:
            shares = ratios(resident["zero2"], resident[name])
            found.append(figure(f"memory/resident/zero2_over_{name}/{over}", shares, "ratio"))
        found.append(figure(f"memory/resident/{name}_mib/{over}", resident[name], "MiB"))
    return found


def measure(arguments: argparse.Namespace) -> list[Figure]:
    names = contenders(QUICK if arguments.quick else CONTENDERS)
    starts = 1 if arguments.quick else 3
    checkpointing = measure_checkpointing(5 if arguments.quick else 25)
    if arguments.checkpointing:
        return checkpointing
    return checkpointing + [f for size in SIZES for f in measure_size(size, arguments.model, names, starts)]


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing only")
    given = parser.parse_args()
    use_packages()  # for their versions
    report(measure(given), given.json)
