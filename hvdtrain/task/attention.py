"""Choose the kernel of attention: what the device, the number format and the model support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

_TOKENS = 16
_VERSIONS = (3, 2, 4)
"""Of flash attention, in the order of preference."""


def choose_attention(model: Any, wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Let a model of transformers use the wanted attention, in place; return a line about what it uses.

    Args:
        model: it uses sdpa where it can, else eager.
        wanted: auto, flash, sdpa or eager.
        device: of training.
        dtype: of forward.

    Errors:
        ConfigError: what is wanted by name is not supported.
    """
    reason = ""
    if wanted in ("auto", "flash"):
        reason = _use_flash(model, device, dtype)
        if not reason:
            return f"attention: {model.config._attn_implementation}"
    used = model.config._attn_implementation
    if wanted not in ("auto", used):
        raise ConfigError(
            f"--model.attention {wanted} is not supported here",
            found=reason or f"{type(model).__name__} has {used} only",
            next_step="--model.attention auto",
        )
    return f"attention: {used}" + (f" ({reason})" if reason else "")


def _use_flash(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Let the model use flash attention; return why not, or an empty text."""
    import torch

    if device.type != "cuda":
        return "flash attention needs a GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return "flash attention needs --precision bf16 or fp16"
    installed = [version for version in _VERSIONS if _is_installed(version)]
    if not installed:
        return "the flash_attn library is not installed"
    before, reason = model.config._attn_implementation, ""
    for version in installed:
        name = f"flash_attention_{version}"
        if version != 2 and getattr(model.config, "attention_dropout", None):
            reason = f"{name} has no dropout"
            continue
        try:
            with _quiet():
                model.set_attn_implementation(name)
                _try(model.config, name, device, dtype)
        except Exception as error:  # of transformers, of the library, of CUDA
            reason = f"{name}: {error}".partition("\n")[0]
            model.set_attn_implementation(before)
            continue
        if model.config._attn_implementation == name:
            return ""
        reason = f"{type(model).__name__} has no flash attention"
    return reason


def _is_installed(version: int) -> bool:
    """Return whether the library of a version is installed; transformers would download another kernel."""
    from transformers import utils

    check: Any = getattr(utils, f"is_flash_attn_{version}_available", lambda: False)
    return bool(check())


def _try(config: Any, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Run forward and backward on a few tokens, with the model's sizes of heads."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    key, value = head_sizes(config)
    given = [
        torch.zeros(1, 1, _TOKENS, size, device=device, dtype=dtype, requires_grad=True) for size in (key, key, value)
    ]
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name), is_causal=True, layer_idx=0)
    result, _ = ALL_ATTENTION_FUNCTIONS[name](module, *given, None, dropout=0.0, scaling=1.0)
    result.sum().backward()


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the size of a key and of a value of one head; in DeepSeek's latent attention they differ."""
    text = config.get_text_config()
    if hasattr(text, "qk_nope_head_dim"):
        return text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size, size


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of transformers about weights on the CPU, or in fp32: they move, and autocast casts."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
