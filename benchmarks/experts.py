"""How long are forward and backward of a mixture of experts under bf16 autocast, by each implementation of its experts?

One process of 1 thread, a DeepSeek-V3 of 4 layers with 16 experts. `ours` is the implementation of
`training.loop.forward.autocast_experts`; the others are those of transformers, of which grouped_mm is the default.
"""

from __future__ import annotations

import time

import torch
from common import Figure, figure, in_turn, main, ratios

from hvdtrain.training.loop.forward import autocast_experts

THEIRS = ("grouped_mm", "eager")
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1,
}  # fmt: skip


def model(implementation: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(DeepseekV3Config(**SIZES))
    if implementation == "ours":
        autocast_experts(made)
    else:
        made.set_experts_implementation(implementation)
    return made


def step(trained: torch.nn.Module, tokens: torch.Tensor, *, low: bool) -> tuple[float, float]:
    """Seconds of forward and backward, and the loss."""
    began = time.perf_counter()
    trained.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = trained(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return time.perf_counter() - began, loss.item()


def measure(quick: bool) -> list[Figure]:
    torch.set_num_threads(1)
    names = ["ours", *THEIRS]
    models = {name: model(name) for name in names}
    tokens = torch.randint(SIZES["vocab_size"], (8, 64), generator=torch.Generator().manual_seed(0))
    losses = {name: step(models[name], tokens, low=True)[1] for name in names}  # the first is slower
    exact = step(models["eager"], tokens, low=False)[1]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(6 if quick else 30):
        for name in in_turn(names, number):
            seconds[name].append(step(models[name], tokens, low=True)[0])
    figures = [figure(f"experts/{name}", ratios(seconds["ours"], seconds[name]), "ratio") for name in THEIRS]
    figures += [figure(f"experts/{name}_ms", [1e3 * s for s in seconds[name]], "ms") for name in names]
    figures += [figure(f"experts/{n}_loss_error", [abs(losses[n] - exact) / exact], "of fp32's loss") for n in names]
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
