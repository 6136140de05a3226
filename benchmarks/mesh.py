"""How many bytes does a rank hold of experts that ranks divide, and how long is a step, beside transformers' own?

2 ranks of 1 thread, the default language model, a mixture of experts, 8 x 128 tokens a rank, AdamW.
Without clipping: torch cannot clip gradients of several meshes, as the peer has them.
`ep_expert_state`: the parameters of experts and their optimizer state on the rank with most, over those of a rank that
has all. `A_over_B`: the median over rounds of the ratio of the steps of one round, in which all jobs take turns (see
jobs.py). `transformers_ep` is `from_pretrained` with a `DistributedConfig` and a plain loop. torchtitan is missing: its
trainer needs a GPU.

--only NAME,NAME measures these jobs alone, and no bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, figure, options, ratios, report
from engines import CONSTANT, nested, step_s
from jobs import Job, Setting, mpirun, take_turns, warmed_up

import hvdtrain

OURS: Mapping[str, Mapping[str, object]] = {
    "replicated": {},
    "ep": {"parallel.ep": 2},
    "ep_fsdp": {"parallel.ep": 2, "parallel.engine": "fsdp"},
    "tp": {"parallel.tp": 2},
    "cp": {"parallel.cp": 2},
    "pp": {"parallel.pp": 2},
    "pp_virtual": {"parallel.pp": 2, "parallel.virtual_stages": 2},
    "pp_4_passes": {"parallel.pp": 2},
}
PASSES = {
    **dict.fromkeys(("tp", "cp"), 1),
    **dict.fromkeys(("pp", "pp_virtual"), 8),
    "pp_4_passes": 4,
}
"""Micro-batches a step, where ranks have the same samples."""
PEER = "engine_loops:transformers_ep"
PAIRS = {
    "ep_over_replicated": ("ep", "replicated"),
    "ep_over_transformers_ep": ("ep", PEER),
    "ep_fsdp_over_replicated": ("ep_fsdp", "replicated"),
    "cp_over_replicated": ("cp", "replicated"),
    "tp_over_replicated": ("tp", "replicated"),
    "pp_over_replicated": ("pp", "replicated"),
    "pp_virtual_over_pp": ("pp_virtual", "pp"),
}
SAMPLES, WARM_UP, STATE_STEPS = 8, 4, 2


class ExpertBytes(hvdtrain.Callback):
    """Writes the bytes of experts on this rank to a file: parameters, and the optimizer's state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_end(self, training: Any, reason: str) -> None:
        """Count what the optimizer updates, and what it keeps of each."""
        owned = training._engine.owned() or {}
        held = 0
        for name, parameter in training.model.named_parameters():
            mine = owned[name].parameter if name in owned else parameter
            if ".experts." in name and mine is not None:
                slots = training.optimizer.state[mine].values()
                held += mine.nbytes + sum(getattr(slot, "nbytes", 0) for slot in slots)
        (self._folder / f"{training.rank}.json").write_text(json.dumps(held))


def train_counted(folder: Path, name: str) -> None:
    """Train on this rank for some steps, and count."""
    train = {"steps": STATE_STEPS, "global_batch": 4, "micro_batch": 2, "eval_samples": 1}
    config = {"run_dir": str(folder / "run"), "train": train, "checkpoint": {"every": 0}}
    hvdtrain.train({**config, **nested(OURS[name])}, callbacks=[ExpertBytes(folder)])


def expert_bytes(name: str) -> int:
    """Return the bytes of experts on the rank with most."""
    with tempfile.TemporaryDirectory() as folder:
        mpirun(name, [__file__, "--rank", folder, name], {}, 180)
        return max(json.loads(file.read_text()) for file in Path(folder).glob("*.json"))


def start(name: str, folder: Path) -> Job:
    if name == PEER:
        return Job(name, Setting("default", SAMPLES, optimizer=CONSTANT, clip=0.0), folder)
    # Biases of routers are not changed, as by the peer.
    ours = {"observe.stall_timeout_s": 0, "train.router_bias": 0, **OURS[name]}
    ours |= {"train.micro_batch": SAMPLES * 2 // PASSES.get(name, 2), "train.global_batch": SAMPLES * 2}
    return Job("ours", Setting("default", SAMPLES, optimizer=CONSTANT, clip=0.0, ours=ours), folder)


def measure(names: list[str], *, quick: bool) -> list[Figure]:
    found = []
    if not {"replicated", "ep"} - {*names}:
        found.append(figure("mesh/ep_expert_state", [expert_bytes("ep") / expert_bytes("replicated")], "ratio"))
    with warmed_up({name: partial(start, name) for name in names}, WARM_UP) as jobs:
        steps = take_turns(jobs, step_s, 2 if quick else 8)
    for name, (ours, other) in PAIRS.items():
        if ours in steps and other in steps:
            found.append(figure(f"mesh/{name}", ratios(steps[ours], steps[other]), "ratio"))
    return [
        *found,
        *(figure(f"mesh/{name.rpartition(':')[2]}_ms", [1e3 * s for s in steps[name]], "ms") for name in names),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train_counted(Path(sys.argv[2]), sys.argv[3])
    else:
        parser = options(__doc__)
        parser.add_argument("--only", metavar="NAMES", help="measure only these jobs, separated by commas")
        given = parser.parse_args()
        every = ["replicated", "ep", PEER] if given.quick else [*OURS, PEER]
        report(measure(given.only.split(",") if given.only else every, quick=given.quick), given.json)
