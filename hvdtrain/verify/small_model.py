"""A small copy of a language model's architecture: the same modules, heads and experts, with narrow matrices."""

from __future__ import annotations

from typing import Any

_WIDTHS = {
    "intermediate_size": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
"""Sizes of matrices that no plan divides by heads or experts."""

_LAYERS = 2
"""Layers after those without experts."""


def small_copy(config: Any, vocabulary: int) -> Any:
    """Return the configuration (of transformers) of a small copy: one kind of layer less often, and narrow."""
    found = config.to_dict()
    text = config.get_text_config()
    if text is not config:
        return config  # of several models: as it is
    dense = min(1, found.get("first_k_dense_replace") or 0)
    layers = min(found.get("num_hidden_layers", _LAYERS), dense + _LAYERS)
    for name, value in list(found.items()):
        if isinstance(value, list) and len(value) == found.get("num_hidden_layers"):
            found[name] = value[:layers]
    sizes: dict[str, Any] = {name: width for name, width in _WIDTHS.items() if found.get(name)}
    sizes |= {"hidden_size": 8 * found.get("num_attention_heads", 8), "num_hidden_layers": layers}
    if "first_k_dense_replace" in found:
        sizes["first_k_dense_replace"] = dense
    sizes |= {"vocab_size": vocabulary, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    found.pop("model_type", None)
    return type(config)(**{**found, **{name: value for name, value in sizes.items() if name in found}})
