"""The attention of models of transformers: its kernel, and attention over sequences that are divided among ranks.

Each rank has a part of the tokens. In attention, it has some of the heads: an all-to-all before it gives a rank all
tokens of its heads, and one after it all heads of its tokens: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509,
2023. Kernels and masks of attention stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils, utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from hvdtrain.comm.dimensions import check_divides
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.state.placeholder import Placeholder
from hvdtrain.task import blocked_attention
from hvdtrain.task.base import SequencePart

_TOKENS = 16
_VERSIONS = (3, 2, 4)  # of flash attention, in the order of preference

_OPTION, _CHECKED = "--parallel.cp", 8


def choose_attention(model: Any, wanted: str, device: torch.device, dtype: torch.dtype, *, tokens: int = 0) -> str:
    """Let a model of transformers use the wanted attention, in place; return a line about what it uses.

    `wanted`: auto, flash, sdpa or eager. `device`: of training. `dtype`: of forward. `tokens`: of a sequence; torch's
    attention of many runs by blocks.

    Errors: ConfigError: what is wanted by name is not supported.
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
    if tokens > 2 * blocked_attention.BLOCK:
        blocked_attention.use_blocks(model)
    return f"attention: {used}" + (f" ({reason})" if reason else "")


def _use_flash(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Let the model use flash attention; return why not, or an empty text."""
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
    return bool(getattr(utils, f"is_flash_attn_{version}_available", lambda: False)())


def _try(config: Any, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Run forward and backward on a few tokens, with the model's sizes of heads."""
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
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def divide_attention(model: Any, part: SequencePart, seq_len: int, *, apart: bool = False) -> None:
    """Let a model of transformers that gets a part of each sequence attend to all of it, in place.

    `model`: its `position_ids` are those in the whole sequence. `apart`: whether documents do not see each other; then
    `position_ids` are those in the document.

    Errors: ConfigError: the tokens, the heads or the attention cannot be divided.
    """
    text, used = model.config.get_text_config(), model.config._attn_implementation
    used = "sdpa" if used == blocked_attention.NAME else used
    heads = getattr(text, "num_attention_heads", 0)
    check_divides(_OPTION, part.count, seq_len, "tokens of a sequence", "another --data.seq_len")
    for count, what in ((heads, "heads"), (getattr(text, "num_key_value_heads", None) or heads, "heads of keys")):
        check_divides(_OPTION, part.count, count, f"{what} of attention")
    if used == "eager":
        has_sdpa = getattr(model, "_supports_sdpa", False)
        found, change = ("eager attention", "--model.attention sdpa, ") if has_sdpa else ("no attention by sdpa", "")
        raise _refused(model, found, change)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refused(model, "a forward without position_ids")
    if dropout := getattr(text, "attention_dropout", 0.0):
        raise _refused(model, f"a dropout of attention weights of {dropout:g}", "--model.dropout 0, ")
    _check_mixing(model)
    places = None
    if apart:
        _check_full_attention(model, used)
        places = _Places(part)
        model.register_forward_pre_hook(places.collect, with_kwargs=True)
    own = f"hvdtrain_{used}_{part.index}"
    attend = partial(_attend, part=part, inner=ALL_ATTENTION_FUNCTIONS[used], name=used)
    AttentionInterface.register(own, attend)
    mask = partial(_mask, count=part.count, places=places, inner=ALL_MASK_ATTENTION_FUNCTIONS[used])
    AttentionMaskInterface.register(own, mask)
    model.set_attn_implementation(own)


class _Changed:
    """A module, or its configuration, with another value of some attributes."""

    def __init__(self, inner: Any, **changed: Any) -> None:
        vars(self).update(changed, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_inner"], name)


def _attend(
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    part: SequencePart,
    inner: Any,
    name: str,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run the kernel `inner` on all tokens of this rank's heads; T are the tokens of a part. As (B, T, H, D)."""
    by_head = [option for option in ("s_aux", "position_bias") if options.get(option) is not None]
    if by_head:
        raise _refused(module, f"attention with {by_head[0]}")
    for heads in (query_BHTD.shape[1], key_BHTD.shape[1]):
        check_divides(_OPTION, part.count, heads, "heads of attention on a rank", "another --parallel.tp")
    options.pop("position_ids", None)  # of this part
    given = (part.exchange(each, 1, 2) for each in (query_BHTD, key_BHTD, value_BHTD))
    renamed = _Changed(module, config=_Changed(module.config, _attn_implementation=name))
    found_BTHD, _ = inner(renamed, *given, attention_mask, **options)
    return part.exchange(found_BTHD, 1, 2), None


class _Places:
    """The positions of all tokens in their documents, of the current pass: (B, T)."""

    def __init__(self, part: SequencePart) -> None:
        self._part = part
        self.whole_BT: Any = None

    def collect(self, model: Any, inputs: Any, options: Mapping[str, Any]) -> None:
        """Collect those of a pass; the model gets a part of them. Collective: yes."""
        own_BT = options["position_ids"]
        self.whole_BT = self._part.exchange(own_BT.repeat(self._part.count, 1), 0, 1)


def _check_full_attention(model: Any, used: str) -> None:
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or (["sliding_attention"] if getattr(text, "sliding_window", 0) else [])
    found = next((kind for kind in kinds if kind != "full_attention"), used if used != "sdpa" else "")
    if found:
        raise ConfigError(
            f"--parallel.cp with separate documents does not support {found} of {type(model).__name__}",
            expected="full attention by sdpa",
            next_step=("" if kinds and found in kinds else "--model.attention sdpa, ")
            + "--data.documents joined, or leave out --parallel.cp",
        )


def _mask(q_length: int, kv_length: int, *, count: int, places: _Places | None, inner: Any, **options: Any) -> Any:
    """Make a mask for all tokens."""
    if places is not None and places.whole_BT is not None:
        # Instead of the one for this part, which the model has made of its positions.
        found = masking_utils.find_packed_sequence_indices(places.whole_BT)
        documents = [] if found is None else [masking_utils.packed_sequence_mask_function(found)]
        options["mask_function"] = masking_utils.and_masks(masking_utils.causal_mask_function, *documents)
        options["allow_is_causal_skip"] = not documents
    if options.get("attention_mask") is not None:
        raise TaskError("--parallel.cp does not support an attention mask of the task", expected="a causal model")
    return inner(q_length=count * q_length, kv_length=count * kv_length, **options)


def _check_mixing(model: Any) -> None:
    """Check on a few tokens that nothing but attention lets a token depend on others.

    Other layers, such as convolutions, and layers with a state, would see a part of the tokens only.

    Errors: ConfigError: without attention, the logits of a token depend on another one.
    """
    if any(isinstance(p, (Placeholder, FakeTensor)) for p in model.parameters()):
        return  # the rank with values checks for all
    used, modes = model.config._attn_implementation, {module: module.training for module in model.modules()}

    def attend_to_nothing(module: Any, query: Tensor, key: Any, value: Tensor, *_: Any, **__: Any) -> Any:
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("hvdtrain_nothing", attend_to_nothing)
    ids = torch.arange(1, _CHECKED + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    others = torch.cat([ids[:, 1:2], ids[:, 1:]], dim=1)
    model.set_attn_implementation("hvdtrain_nothing")
    model.eval()
    try:
        with torch.no_grad():
            logits, changed = (model(input_ids=given, use_cache=False).logits for given in (ids, others))
    finally:
        model.set_attn_implementation(used)
        for module, training in modes.items():
            module.training = training
    if not (logits - changed)[:, 1:].norm() <= 1e-6 * logits.norm():  # experts may round other sums
        raise _refused(model, "layers other than attention in which tokens depend on each other")


def _refused(model: Any, found: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"--parallel.cp does not support {type(model).__name__}",
        expected="a causal language model of transformers without dropout, in which only attention mixes tokens, by"
        " sdpa or flash",
        found=found,
        next_step=f"{instead}use another model, or leave out --parallel.cp",
    )
