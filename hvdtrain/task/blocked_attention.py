"""Attention under a mask by blocks of tokens: memory grows with the tokens, not with their square.

Documents that do not see each other, and sliding windows, need a mask. torch's kernels take one of all tokens by all
tokens, and compute also what it hides. Here each block of queries runs by itself, with the keys from the first one that
it sees, and with a mask of these.

Library rejected: torch's `flex_attention` does it without any mask, but only compiled; on CPUs it has no backward pass.
Flash attention, where it is installed, needs neither: `sequence.choose_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_tracing

NAME = "hvdtrain_blocks"  # of this attention in the registries of transformers
BLOCK = 512  # queries that run at a time; with at most twice as many tokens, all run at once


class Masked:
    """What a mask would say, and where the keys of each block of queries begin.

    Args:
        sees: takes indices of rows, heads, queries and keys, and returns whether a query sees a key.
        first: of the keys, for each block.
    """

    def __init__(self, sees: Callable[..., Tensor], rows: int, first: list[int], device: torch.device) -> None:
        self.first = first
        self._sees, self._rows, self._device = sees, rows, device

    def of(self, begin: int, end: int, first: int) -> Tensor:
        """Return which of the keys `first` to `end` queries see: (B, 1, queries, keys)."""
        return _seen(self._sees, self._rows, torch.arange(begin, end, device=self._device), first, end)


def _seen(sees: Callable[..., Tensor], rows: int, queries_Q: Tensor, first: int, end: int) -> Tensor:
    rows_B, keys_K = (torch.arange(*ends, device=queries_Q.device) for ends in ((0, rows), (first, end)))
    found = sees(rows_B[:, None, None, None], rows_B.new_zeros(()), queries_Q[None, None, :, None], keys_K)
    return found.expand(rows, 1, len(queries_Q), end - first)


def use_blocks(model: Any) -> bool:
    """Let a model of transformers that uses torch's attention run it by blocks where it has a mask; return whether.

    Compiled blocks of a model keep masks as tensors: they would be compiled again for other documents.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)

    def check(*_: Any) -> None:
        once.remove()
        if model.config._attn_implementation == NAME and any(map(_is_compiled, model.modules())):
            model.set_attn_implementation("sdpa")

    once = model.register_forward_pre_hook(check)
    return True


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")


def _mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
    """Return the mask for a model's layers: `Masked`, or that of transformers' `sdpa_mask` where blocks do not fit."""
    if _is_for_blocks(q_length, kv_length, **options):
        sees, device = options["mask_function"], torch.device(options.get("device", "cpu"))
        if first := _first_keys(sees, batch_size, q_length, device):
            return Masked(sees, batch_size, first, device)
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)


def _is_for_blocks(q_length: int, kv_length: int, **options: Any) -> bool:
    """Return whether there is a mask, of all tokens of a sequence, without padding, and of known functions."""
    window = options.get("local_size")
    has_none = options.get("allow_is_causal_skip", True) and (window is None or kv_length <= window)
    special = ("q_offset", "kv_offset", "use_vmap", "allow_is_bidirectional_skip")
    others = any(options.get(name) not in (None, False, 0) for name in special)
    return q_length == kv_length > 2 * BLOCK and not has_none and not others and options.get("attention_mask") is None


def _first_keys(sees: Callable[..., Tensor], rows: int, tokens: int, device: torch.device) -> list[int]:
    """Return the first key that a query of each block sees, in any row; none if a block sees later tokens."""
    begins_N = torch.arange(0, tokens, BLOCK, device=device)
    ends_N = (begins_N + BLOCK).clamp(max=tokens) - 1
    at_begin, at_end = (_seen(sees, rows, each, 0, tokens)[:, 0] for each in (begins_N, ends_N))
    # Later queries of a block see no earlier keys than its first one: documents and windows only move on.
    first_N = at_begin.int().argmax(dim=2).amin(dim=0)
    later = (at_end & (torch.arange(tokens, device=device) > ends_N[:, None])).any()
    if is_tracing(first_N):  # no values
        return [0] * len(begins_N)
    *first, is_later = torch.cat([first_N, later[None]]).tolist()
    return [] if is_later else first


def _attend(
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Masked | Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run torch's attention, by blocks if the mask is `Masked`. As (B, T, H, D)."""
    tokens = query_BHTD.shape[2]
    if isinstance(attention_mask, Masked) and options.get("position_bias") is not None:
        attention_mask = attention_mask.of(0, tokens, 0)
    if not isinstance(attention_mask, Masked):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **options
        )
        return found
    parts = []
    for number, first in enumerate(attention_mask.first):
        begin, end = number * BLOCK, min((number + 1) * BLOCK, tokens)
        given = query_BHTD[:, :, begin:end], *(each[:, :, first:end] for each in (key_BHTD, value_BHTD))
        parts.append(sdpa_attention_forward(module, *given, attention_mask.of(begin, end, first), **options)[0])
    return torch.cat(parts, dim=1), None
