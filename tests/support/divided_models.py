"""Language models that ranks divide, small enough for milliseconds, and the variants in which laws hold."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain import Task
from hvdtrain.plan import shards
from hvdtrain.task.base import SequencePart
from hvdtrain.task.lora import LoraOptions, add_adapters
from hvdtrain.task.sequence import divide_attention
from hvdtrain.task.token_loss import next_token_loss

DIVIDED = (
    f"--task={Path(__file__)}:divided",
    "--train.steps=4",
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
    "adapted": ("--adapted=true",),
    "own": ("--kind=own",),
    "many": ("--method=adamw", "--train.global_batch=10"),
    "deep": ("--layers=4", "--train.global_batch=8"),
    "dropping": ("--kind=gpt2", "--train.global_batch=8"),
    "balanced": ("--train.balance_loss=0.05",),
    "longer": ("--train.steps=6",),
}
"""Options of trainings. Two pipelines of two ranks need the many micro-batches. Rows of wide matrices are divided, and
Adagrad has state before a step."""
ROUNDED = {name: (f"--precision={name}",) for name in ("fp16", "bf16", "bf16-weights")}
"""Options of trainings in which sums of other parts are rounded."""
_WORDS: dict[str, tuple[str, ...]] = {
    **{f"{way}{size}": (f"--parallel.{way}={size}",) for way in ("tp", "ep", "cp", "pp") for size in (2, 4)},
    "ddp": ("--parallel.engine=ddp",),
    "fsdp": ("--parallel.engine=fsdp",),
    "groups": ("--parallel.engine=fsdp", "--parallel.dp_shard=2"),
    "gradients": ("--parallel.shard=gradients",),
    "zero": ("--parallel.shard=optimizer",),
    "elements": ("--elements=true",),
    "buckets": ("--parallel.bucket_mib=0.25",),
    "virtual": ("--parallel.virtual_stages=2",),
    "small": ("--train.micro_batch=1",),
    "hosted": ("--memory.offload=optimizer",),
    "checked": ("--parallel.buffers=check",),
    "half": ("--parallel.compression=fp16",),
    "brain": ("--parallel.compression=bf16",),
    "stochastic": ("--parallel.compression=int8-stochastic",),
    "int8": ("--parallel.compression=int8",),
    "topk": ("--parallel.compression=topk:0.5",),
    "powersgd": ("--parallel.compression=powersgd:4",),
    "auto": ("--parallel.compression=auto",),
}
"""Options by the words that names of meshes are made of."""


def _options(name: str) -> tuple[str, ...]:
    """Of a training, by its name: words without a space, /, variants."""
    mesh, variant = name.split("/")
    words = re.findall("|".join(_WORDS), mesh)
    assert "".join(words) == mesh, name
    return (*(option for word in words for option in _WORDS[word]), *of_variant(variant))


def of_variant(name: str) -> tuple[str, ...]:
    """Options of one or more variants, joined by +."""
    return tuple(option for each in name.split("+") for option in {**VARIANTS, **ROUNDED}[each])


def _trainings(table: str) -> dict[str, tuple[str, ...]]:
    """Options by name, of a table with the variants of meshes."""
    rows = [line.split(": ") for line in table.strip().splitlines()]
    names = [
        f"{mesh}/{variant}" for meshes, variants in rows for mesh in meshes.split() for variant in variants.split()
    ]
    return {name: _options(name) for name in names}


TWO = _trainings("""
    tp2: latent+longer whole_queries+momentum heads norms+recomputed tied adamw+averaged frozen own
    ep2: latent+longer adamw+averaged recomputed+frozen own bf16-weights
    cp2: latent+longer heads adamw+recomputed
    cp2ddp cp2fsdp cp2gradients: latent
    pp2: latent+longer heads adamw+averaged recomputed+frozen tied dropping balanced fp16 bf16-weights
    tp2: adapted+adamw fp16 bf16 bf16-weights
    pp2virtual: dropping
    cp2int8 cp2topk cp2auto: latent
    cp2ddpbrain: fp16
    cp2ddppowersgd: bf16
    cp2ddphalfbucketschecked: bf16-weights
""")
"""Of two ranks, by mesh and variants."""
FOUR = _trainings("""
    ep2 tp4 ep4 tp2ep4 cp2 cp2groups cp2tp2 cp2ep4 cp2tp2ep4fsdp: latent
    tp2: norms
    tp2ep2 tp2ep4zeroelements ep2groups: adamw
    cp4 pp2cp2: heads
    pp2 pp2zero pp2ep2 pp2ep2fsdp pp2fsdp: many
    tp2zerobuckets: wide
    ep2zero: frozen
    tp2zerohosted tp2gradients: norms
    ep2gradientshosted: adamw
    ep2gradients: own
    tp2ep4gradients: frozen
    pp2tp2: norms tied adapted
    ep2fsdp: frozen+recomputed adamw bf16-weights
    tp2fsdp: own tied bf16-weights
    tp2ep4fsdp: averaged+adapted
    tp2zero: adapted
    pp4 pp2zero: dropping
    pp2fsdpsmall: recomputed+averaged frozen bf16-weights
    tp2half: latent
    ep2zerohosted: adamw
    cp2pp2virtualzerohostedbucketschecked: deep+fp16+averaged
    ep2pp2virtualhalf: deep+fp16
    tp2pp2virtualbrainchecked: deep+bf16
    pp2virtualstochastic: deep+bf16-weights
    ep2cp2groupsstochasticbucketschecked: bf16+averaged
    ep2groupsbrain: bf16-weights
""")
"""Of four ranks."""
STAGES = {
    "experts": (_options("ep2/latent"), _options("tp2ep4fsdp/latent"), ()),
    "sequences": (_options("cp2/latent"), _options("cp2tp2/latent"), ()),
    "layers": (_options("pp2/many"), _options("pp2tp2/many"), VARIANTS["many"]),
    "tied": tuple((*_options(f"{mesh}/dropping"), "--train.ema=0.9") for mesh in ("pp2", "pp4", "")),
    "matrices": (_options("tp2/adamw"), _options("tp2zerohostedelements/adamw"), VARIANTS["adamw"]),
    "blocks": (_options("pp2/many"), _options("pp2fsdp/many"), VARIANTS["many"]),
    "rows": (_options("fsdp/own"), _options("tp2fsdp/own"), VARIANTS["own"]),
    "adapters": (_options("tp2/adapted"), _options("tp2ep4fsdp/adapted"), VARIANTS["adapted"]),
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
    kind: str = "deepseek",
    method: str = "sgd",
    queries: int | None = 16,
    tied: bool = False,
    frozen: bool = False,
    adapted: bool = False,
    layers: int = 2,
    elements: bool = False,
) -> Task:
    """Make the task: a DeepSeek-V3 with 8 experts a layer, or another kind of model.

    `elements`: ranks that divide the optimizer divide rows, too.
    """
    shards._CHUNK = 16 if elements else 1 << 16
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
            **{**_SIZES, **_TOKENS, "intermediate_size": 48, "kv_lora_rank": 16, **sizes}
            | {"num_hidden_layers": layers}, moe_intermediate_size=16,
            n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, first_k_dense_replace=1,
            num_key_value_heads=4, q_lora_rank=queries, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_group=2,
            topk_group=1, num_mtp_layers=0,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
    if adapted:
        add_adapters(model, LoraOptions(rank=3, alpha=6.0))
    optimizers: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, fused=True),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    }
    optimizer = optimizers[method]([p for p in model.parameters() if p.requires_grad or frozen])
    by_part = partial(_by_part, model)
    options: Any = {"nominal_weight": 8.0, "by_part": by_part, "remakes_frozen": adapted}
    return Task(model, next_token_loss, data, data, optimizer=optimizer, **options)


def _by_part(model: torch.nn.Module, part: SequencePart) -> Any:
    divide_attention(model, part, 8)
    return partial(next_token_loss, part=part)
