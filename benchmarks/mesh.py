"""How many bytes does a rank hold that divides a model, at its start and later, and how long is a step, beside peers'?

2 ranks of 1 thread, the default language model, a mixture of experts, 8 x 128 tokens a rank, AdamW.
Without clipping: torch cannot clip gradients of several meshes, as the peer has them.
`ep_expert_state`: the parameters of experts and their optimizer state on the rank with most, over those of a rank that
has all. `load_peak`: the most that a rank holds while it reads the folder of a pretrained model (475 MB, 36 layers of
16 experts), over its own parameters then, both less those of a model of two layers; of the rank with the highest ratio.
`A_over_B`: the median over rounds of the ratio of the steps of one round, in which all jobs take turns (see jobs.py).
`transformers_ep` is `from_pretrained` with a `DistributedConfig` and a plain loop. torchtitan was not tried.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, figure, main, ratios
from engines import CONSTANT, nested, step_s
from jobs import Job, Setting, mpirun, take_turns, warmed_up
from memory_job import peak_resident_mib

import hvdtrain
from hvdtrain.state.divided import local

OURS: Mapping[str, Mapping[str, object]] = {
    "replicated": {},
    "ep": {"parallel.ep": 2},
    "tp": {"parallel.tp": 2},
    "cp": {"parallel.cp": 2},
    "pp": {"parallel.pp": 2},
}
PASSES = {"tp": 1, "cp": 1, "pp": 8}
"""Micro-batches a step, where ranks have the same samples."""
PEER = "engine_loops:transformers_ep"
PAIRS = {
    "ep_over_replicated": ("ep", "replicated"),
    "ep_over_transformers_ep": ("ep", PEER),
    "cp_over_replicated": ("cp", "replicated"),
    "tp_over_replicated": ("tp", "replicated"),
    "pp_over_replicated": ("pp", "replicated"),
}
SAMPLES, WARM_UP, STATE_STEPS = 8, 4, 2
LOADED, LAYERS = ("tp", "ep", "pp"), (2, 36)
PRETRAINED = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "first_k_dense_replace": 0, "n_routed_experts": 16, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


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


class LoadPeak(hvdtrain.Callback):
    """Writes to a file the most that this process held, and its parameters; bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_begin(self, training: Any) -> None:
        """Measure: the model is placed now."""
        own = sum(local(parameter).nbytes for parameter in training.model.parameters())
        found = [peak_resident_mib() * (1 << 20), own]
        (self._folder / f"{training.rank}.json").write_text(json.dumps(found))


def load(folder: Path, name: str, pretrained: str) -> None:
    """Read a pretrained folder on this rank, and measure."""
    train = {"steps": 1, "global_batch": 8, "micro_batch": 1, "eval_samples": 1}
    config = {"train": train, "checkpoint": {"every": 0}, "data": {"seq_len": 32}, **nested(OURS[name])}
    given = {**config, "run_dir": str(folder / "run"), "model": {"from": pretrained}}
    hvdtrain.train(given, callbacks=[LoadPeak(folder)])


def load_peak(name: str, folders: Mapping[int, str]) -> float:
    """Return the highest ratio of a rank. `folders`: of pretrained models, by number of layers."""
    few, many = sorted(folders)
    found: dict[int, list[list[float]]] = {}
    for layers, pretrained in folders.items():
        with tempfile.TemporaryDirectory() as folder:
            mpirun(name, [__file__, "--load", folder, name, pretrained], {}, 300)
            found[layers] = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    of_ranks = zip(found[few], found[many], strict=True)
    return max((peak - small_peak) / (own - small_own) for (small_peak, small_own), (peak, own) in of_ranks)


def save_pretrained(folder: Path, layers: int) -> str:
    """Write the folder of a model with random weights; return its path."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**PRETRAINED, num_hidden_layers=layers))
    model.save_pretrained(folder / str(layers), max_shard_size="100MB")
    return str(folder / str(layers))


def start(name: str, folder: Path) -> Job:
    if name == PEER:
        return Job(name, Setting("default", SAMPLES, optimizer=CONSTANT, clip=0.0), folder)
    # Biases of routers are not changed, as by the peer.
    ours = {"observe.stall_timeout_s": 0, "train.router_bias": 0, **OURS[name]}
    ours |= {"train.micro_batch": SAMPLES * 2 // PASSES.get(name, 2), "train.global_batch": SAMPLES * 2}
    return Job("ours", Setting("default", SAMPLES, optimizer=CONSTANT, clip=0.0, ours=ours), folder)


def measure(quick: bool) -> list[Figure]:
    whole, divided = expert_bytes("replicated"), expert_bytes("ep")
    found = [figure("mesh/ep_expert_state", [divided / whole], "ratio")]
    with tempfile.TemporaryDirectory() as folder:
        pretrained = {layers: save_pretrained(Path(folder), layers) for layers in LAYERS}
        for name in LOADED[:1] if quick else LOADED:
            ratios_of = [load_peak(name, pretrained) for _ in range(1 if quick else 3)]
            found.append(figure(f"mesh/load_peak/{name}", ratios_of, "ratio"))
    names = ["replicated", "ep", PEER] if quick else [*OURS, PEER]
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
    elif sys.argv[1:2] == ["--load"]:
        load(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main(__doc__, measure)
