"""Sizes of DeepSeek-V3 (arXiv 2412.19437): those that `--model.preset` names."""

from __future__ import annotations

from typing import Any

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
