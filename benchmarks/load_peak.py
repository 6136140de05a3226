"""How much memory does a rank need to read a pretrained model if it keeps only a part of it?

2 ranks, the folder of a DeepSeek-V3 with 72 layers of 16 experts (950 MB): what a process holds besides differs by 30
MB from start to start. `load_peak`: the most that a rank holds until the first step, over its own parameters then, both
less those of a model of two layers; of the rank with the highest ratio.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import Figure, figure, main
from jobs import mpirun
from memory_job import peak_resident_mib

import hvdtrain
from hvdtrain.state.divided import local

DIVIDED, LAYERS = ("tp", "ep", "pp"), (2, 72)
PRETRAINED = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "first_k_dense_replace": 0, "n_routed_experts": 16, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


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
    config = {"train": train, "checkpoint": {"every": 0}, "data": {"seq_len": 32}, "parallel": {name: 2}}
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


def measure(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        pretrained = {layers: save_pretrained(Path(folder), layers) for layers in LAYERS}
        return [
            figure(f"load_peak/{name}", [load_peak(name, pretrained) for _ in range(1 if quick else 3)], "ratio")
            for name in (DIVIDED[:1] if quick else DIVIDED)
        ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        load(Path(sys.argv[2]), *sys.argv[3:])
    else:
        main(__doc__, measure)
