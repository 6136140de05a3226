"""Options of the language model, with the sizes of DeepSeek-V3 (arXiv 2412.19437) that `--model.preset` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and initial weights.

    Attributes:
        preset: DeepSeek-V3 with latent attention and a mixture of experts: tiny (for tests), small (7 million
            parameters), 125m, 1b (0.2 billion of them active for each token), 16b (2.2 billion active) or 671b (36
            billion active). The vocabulary depends on the data, and is not counted here
        config: train another architecture with new weights: config.json of any causal language model that transformers
            supports (default: model.preset)
        from_: begin with the weights of a run (RUN, RUN@best, RUN@STEP), a checkpoint, or a folder with config.json
            and safetensors files, at step 0; or of another trainer's checkpoint next to a config.json or with
            model.config: dcp:FOLDER, deepspeed:FOLDER, lightning:FILE, torch:FILE (default: new weights of
            model.preset)
        dropout: dropout rate of the attention weights (default: the model's own)
        attention: kernel of attention: flash (the flash_attn library, on GPUs in bf16 or fp16), sdpa (torch's), eager
            (whole scores in memory), or auto: the first of these that works
        lora: freeze the model, and train low-rank matrices next to its linear layers: rank=16, or
            rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. Checkpoints contain only these matrices (default: train
            the whole model; alpha twice the rank, no dropout, all linear layers but the LM head)
        mtp_layers: also train this many layers for multi-token prediction, as in DeepSeek-V3: the first predicts the
            token after the next one, and so on. The loss that is shown is that of the next token
        mtp_weight: weight of the mean of their losses in training
    """

    preset: Literal["tiny", "small", "125m", "1b", "16b", "671b"] = "small"
    config: str | None = None
    from_: str | None = None
    dropout: float | None = None
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    lora: str | None = None
    mtp_layers: int = 0
    mtp_weight: float = 0.3


_COLUMNS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "first_k_dense_replace", "num_hidden_layers", "num_attention_heads", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group",
    "routed_scaling_factor",
)  # fmt: skip
_ROWS: dict[str, tuple[int | float | None, ...]] = {
    "tiny": (32, 64, 16, 4, 1, 2, 1, 2, 2, 16, 16, 8, 8, 8, 1, 1, 1.0),
    "small": (256, 688, 256, 8, 1, 2, 1, 4, 8, 128, 64, 32, 16, 32, 1, 1, 1.0),
    "125m": (512, 1408, 384, 16, 1, 4, 1, 12, 8, 256, 128, 64, 32, 64, 1, 1, 1.0),
    "1b": (1024, 2816, 512, 32, 1, 4, 1, 19, 16, 384, 256, 64, 32, 64, 1, 1, 1.0),
    "16b": (2048, 11264, 1408, 64, 2, 6, 1, 27, 16, None, 512, 128, 64, 128, 1, 1, 2.446),
    "671b": (7168, 18432, 2048, 256, 1, 8, 3, 61, 128, 1536, 512, 128, 64, 128, 8, 4, 2.5),
}
_SHARED: dict[str, Any] = {"num_mtp_layers": 0, "bos_token_id": None, "eos_token_id": None, "use_cache": False}


def preset_config(name: str, *, vocabulary: int, positions: int) -> Any:
    """Return the transformers configuration of a preset."""
    from transformers import DeepseekV3Config

    sizes = dict(zip(_COLUMNS, _ROWS[name], strict=True))
    heads = sizes["num_attention_heads"]
    return DeepseekV3Config(
        **_SHARED, **sizes, num_key_value_heads=heads, vocab_size=vocabulary, max_position_embeddings=positions
    )
