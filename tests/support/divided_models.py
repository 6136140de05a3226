"""Language models that ranks divide, small enough for milliseconds, and the variants in which laws hold."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain import Task
from hvdtrain.task.base import SequencePart
from hvdtrain.task.sequence import divide_attention
from hvdtrain.task.token_loss import next_token_loss

DIVIDED = (
    f"--task={Path(__file__)}:divided",
    "--train.steps=6",
    "--train.micro_batch=2",
    "--train.eval_samples=3",
    "--train.global_batch=6",  # ranks have different numbers of micro-batches, or none
    "--train.check_every=2",
    "--train.clip=0.5",
    "--checkpoint.every=3",
    "--train.eval_every=2",
)
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "use_cache": False}
_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

TP, EP, CP, PP = "--parallel.tp=", "--parallel.ep=", "--parallel.cp=", "--parallel.pp="
LATER = "--parallel.zero_bubble=true"
ZERO, FSDP = "--parallel.shard=optimizer", "--parallel.engine=fsdp"
SMALL = "--train.micro_batch=1"
VARIANTS: dict[str, tuple[str, ...]] = {
    "latent": (),
    "whole_queries": ("--queries=null",),
    "heads": ("--kind=llama",),
    "norms": ("--kind=qwen",),
    "tied": ("--kind=llama", "--tied=true"),
    "momentum": ("--method=momentum",),
    "adamw": ("--method=adamw",),
    "wide": ("--kind=wide", "--method=adagrad"),
    "averaged": ("--train.ema=0.9",),
    "recomputed": ("--memory.checkpointing=full",),
    "frozen": ("--frozen=true",),
    "own": ("--kind=own",),
    "many": ("--method=adamw", "--train.global_batch=10"),
    "dropping": ("--kind=gpt2", "--train.global_batch=8"),
    "balanced": ("--train.balance_loss=0.05",),
}
"""Options of trainings. Two pipelines of two ranks need the many micro-batches. Rows of wide matrices are divided, and
Adagrad has state before a step."""
ROUNDED = {name: (f"--precision={name}",) for name in ("fp16", "bf16", "bf16-weights")}
"""Options of trainings in which sums of other parts are rounded."""
ENGINES = {
    "ddp": ("--parallel.engine=ddp",),
    "fsdp": ("--parallel.engine=fsdp",),
    "zero": ("--parallel.shard=gradients",),
}
"""Options of engines that any ranks may have that divide sequences."""
TWO = {
    **{
        f"tp2/{name}": (TP + "2", *options)
        for name, options in VARIANTS.items()
        if name not in ("many", "wide", "dropping", "balanced")
    },
    **{
        f"ep2/{name}": (EP + "2", *VARIANTS[name])
        for name in ("latent", "adamw", "averaged", "recomputed", "frozen", "own")
    },
    **{f"cp2/{name}": (CP + "2", *VARIANTS[name]) for name in ("latent", "heads", "adamw", "recomputed")},
    **{
        f"pp2/{name}": (PP + "2", *VARIANTS[name])
        for name in ("latent", "heads", "adamw", "averaged", "recomputed", "frozen", "tied", "dropping", "balanced")
    },
    "pp2virtual/dropping": (PP + "2", "--parallel.virtual_stages=2", *VARIANTS["dropping"]),
    "pp2virtuallater/dropping": (PP + "2", "--parallel.virtual_stages=2", LATER, *VARIANTS["dropping"]),
    **{f"pp2later/{name}": (PP + "2", LATER, *VARIANTS[name]) for name in ("latent", "recomputed", "tied")},
    **{f"cp2{name}/latent": (CP + "2", *options) for name, options in ENGINES.items()},
    **{f"tp2/{name}": (TP + "2", *options) for name, options in ROUNDED.items()},
    **{f"pp2/{name}": (PP + "2", *ROUNDED[name]) for name in ("fp16", "bf16-weights")},
    **{f"pp2later/{name}": (PP + "2", LATER, *ROUNDED[name]) for name in ("bf16", "fp16", "bf16-weights")},
    "ep2/bf16-weights": (EP + "2", *ROUNDED["bf16-weights"]),
}
"""Of two ranks, by mesh and variant."""
FOUR = {
    "tp2/latent": (TP + "2",),
    "ep2/latent": (EP + "2",),
    "tp4/latent": (TP + "4",),
    "ep4/latent": (EP + "4",),
    "tp2ep2/adamw": (TP + "2", EP + "2", *VARIANTS["adamw"]),
    "tp2ep4/latent": (TP + "2", EP + "4"),
    "cp2/latent": (CP + "2",),
    "cp2groups/latent": (CP + "2", *ENGINES["fsdp"], "--parallel.dp_shard=2"),
    "cp4/heads": (CP + "4", *VARIANTS["heads"]),
    "cp2tp2/latent": (CP + "2", TP + "2"),
    "cp2ep4/latent": (CP + "2", EP + "4"),
    "pp2/many": (PP + "2", *VARIANTS["many"]),
    "tp2zero/wide": (TP + "2", ZERO, "--parallel.bucket_mib=0.25", *VARIANTS["wide"]),
    "tp2ep4zero/adamw": (TP + "2", EP + "4", ZERO, *VARIANTS["adamw"]),
    "ep2zero/frozen": (EP + "2", ZERO, *VARIANTS["frozen"]),
    "tp2/norms": (TP + "2", *VARIANTS["norms"]),
    "tp2zero/norms": (TP + "2", ZERO, *VARIANTS["norms"]),
    "tp2fsdp/norms": (TP + "2", FSDP, *VARIANTS["norms"]),
    "pp2tp2/norms": (PP + "2", TP + "2", *VARIANTS["norms"]),
    "ep2fsdp/frozen": (EP + "2", FSDP, *VARIANTS["frozen"]),
    "ep2fsdp/recomputed": (EP + "2", FSDP, *VARIANTS["recomputed"]),
    "ep2fsdp/bf16-weights": (EP + "2", FSDP, *ROUNDED["bf16-weights"]),
    "cp2tp2ep4fsdp/latent": (CP + "2", TP + "2", EP + "4", FSDP),
    "tp2fsdp/own": (TP + "2", FSDP, *VARIANTS["own"]),
    "tp2fsdp/tied": (TP + "2", FSDP, *VARIANTS["tied"]),
    "ep2fsdp/adamw": (EP + "2", FSDP, *VARIANTS["adamw"]),
    "tp2ep4fsdp/averaged": (TP + "2", EP + "4", FSDP, *VARIANTS["averaged"]),
    "tp2fsdp/bf16-weights": (TP + "2", FSDP, *ROUNDED["bf16-weights"]),
    "pp2zero/many": (PP + "2", ZERO, *VARIANTS["many"]),
    "pp2tp2/latent": (PP + "2", TP + "2"),
    "pp2ep2/many": (PP + "2", EP + "2", *VARIANTS["many"]),
    "pp2cp2/heads": (PP + "2", CP + "2", *VARIANTS["heads"]),
    "ep2groups/adamw": (EP + "2", FSDP, "--parallel.dp_shard=2", *VARIANTS["adamw"]),
    "pp4later/dropping": (PP + "4", LATER, *VARIANTS["dropping"]),
    "pp2tp2later/norms": (PP + "2", TP + "2", LATER, *VARIANTS["norms"]),
    "pp2zerolater/many": (PP + "2", ZERO, LATER, *VARIANTS["many"]),
    "pp4/dropping": (PP + "4", *VARIANTS["dropping"]),
    "pp2zero/dropping": (PP + "2", ZERO, *VARIANTS["dropping"]),
    "pp2ep2fsdp/many": (PP + "2", EP + "2", FSDP, *VARIANTS["many"]),
    "pp2fsdp/many": (PP + "2", FSDP, *VARIANTS["many"]),
    **{f"pp2fsdp/{name}": (PP + "2", FSDP, SMALL, *VARIANTS[name]) for name in ("recomputed", "averaged", "frozen")},
    "pp2fsdp/bf16-weights": (PP + "2", FSDP, SMALL, *ROUNDED["bf16-weights"]),
    "pp2tp2/tied": (PP + "2", TP + "2", *VARIANTS["tied"]),
}
"""Of four ranks."""
STAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "experts": ((EP + "2",), (TP + "2", EP + "4", FSDP), ()),
    "sequences": ((CP + "2",), (CP + "2", TP + "2"), ()),
    "layers": ((PP + "2", *VARIANTS["many"]), (PP + "2", TP + "2", *VARIANTS["many"]), VARIANTS["many"]),
    "tied": tuple((*mesh, *VARIANTS["dropping"], "--train.ema=0.9") for mesh in ((PP + "2",), (PP + "4",), ())),
    "matrices": ((TP + "2", "--method=adamw"), (TP + "2", ZERO, "--method=adamw"), ("--method=adamw",)),
    "blocks": (
        (PP + "2", *VARIANTS["many"]),
        (PP + "2", FSDP, *VARIANTS["many"]),
        VARIANTS["many"],
    ),
    "rows": ((FSDP, *VARIANTS["own"]), (TP + "2", FSDP, *VARIANTS["own"]), VARIANTS["own"]),
}
"""Options of a run on two, four and one rank, one after the other."""


class OwnExperts(torch.nn.Module):
    """Experts with the interface that plans expect, of no library."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.num_experts = count
        self.matrices = torch.nn.Parameter(torch.randn(count, width, width) / width)

    def forward(self, tokens_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        own_TK = experts_TK.clamp(max=self.num_experts - 1)  # others have weight 0
        out_TKD = torch.einsum("td,tkdc->tkc", tokens_TD, self.matrices[own_TK]).tanh()
        return (out_TKD * weights_TK.unsqueeze(-1)).sum(dim=1)


class OwnBlock(torch.nn.Module):
    """A layer of two matrices, then experts that a router chooses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 3 * width), torch.nn.Linear(3 * width, width)
        self.gate, self.experts = torch.nn.Linear(width, 4), OwnExperts(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        weights, experts = self.gate(x).softmax(dim=-1).topk(2)
        return x + self.experts(x, experts, weights)


class Own(torch.nn.Module):
    """A model of no library."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, width), torch.nn.Linear(width, 64)
        self.blocks = torch.nn.ModuleList(OwnBlock(width) for _ in range(2))
        self.rare_up, self.rare_down = torch.nn.Linear(width, 6), torch.nn.Linear(6, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids).flatten(0, 1)
        if ids[0, 0] % 3 == 0:  # not in each micro-batch, so not always in a step's last one
            x = x + self.rare_down(self.rare_up(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


OWN_PLAN = {
    "rare_up": "colwise",
    "rare_down": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.experts": "ep_dispatch_experts",
    "blocks.*.experts.matrices": "grouped_gemm",
}


def _own_loss(model: torch.nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    logits, targets = model(rows[:, :-1]), rows[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), float(len(targets))


class Tokens(torch.utils.data.Dataset[Any]):
    """Rows of 9 tokens in which each depends on the one before."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(9) * (index % 7 + 1) + index) % 64


def divided(
    kind: str = "deepseek", method: str = "sgd", queries: int | None = 16, tied: bool = False, frozen: bool = False
) -> Task:
    """Make the task: a DeepSeek-V3 with 8 experts a layer, or another kind of model."""
    data = Tokens()
    if kind == "own":
        model: torch.nn.Module = Own()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Task(model, _own_loss, data, data, optimizer=optimizer, nominal_weight=8.0, plan=OWN_PLAN)
    from transformers import AutoModelForCausalLM, DeepseekV3Config, GPT2Config, LlamaConfig, Qwen3Config

    if kind == "gpt2":  # tied, with dropout everywhere
        config: Any = GPT2Config(**_TOKENS, n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=16)
    elif kind == "qwen":
        config = Qwen3Config(**_SIZES, **_TOKENS, num_key_value_heads=2, head_dim=8, intermediate_size=48)
    elif kind == "llama":
        config = LlamaConfig(**_SIZES, **_TOKENS, num_key_value_heads=4, intermediate_size=72, tie_word_embeddings=tied)
    else:
        sizes = {"hidden_size": 512, "intermediate_size": 512, "kv_lora_rank": 136} if kind == "wide" else {}
        config = DeepseekV3Config(
            **{**_SIZES, **_TOKENS, "intermediate_size": 48, "kv_lora_rank": 16, **sizes}, moe_intermediate_size=16,
            n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1,
            num_key_value_heads=4, q_lora_rank=queries, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_group=2,
            topk_group=1, num_mtp_layers=0,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    }
    optimizer = optimizers[method](model.parameters())
    return Task(
        model, next_token_loss, data, data, optimizer=optimizer, nominal_weight=8.0, by_part=partial(_by_part, model)
    )


def _by_part(model: torch.nn.Module, part: SequencePart) -> Any:
    divide_attention(model, part, 8)
    return partial(next_token_loss, part=part)
