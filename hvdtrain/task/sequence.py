"""Attention over whole sequences by ranks that have a part of the tokens each: in it, each rank has some of the heads.

An all-to-all before attention gives a rank all tokens of its heads, and one after it all heads of its tokens: Jacobs et
al., "DeepSpeed Ulysses", arXiv 2309.14509, 2023. Kernels and masks of attention stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.comm.dimensions import check_divides
from hvdtrain.errors import ConfigError, TaskError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hvdtrain.task.base import SequencePart

_OPTION, _TOKENS = "--parallel.cp", 8


def divide_attention(model: Any, part: SequencePart, seq_len: int, *, apart: bool = False) -> None:
    """Let a model of transformers that gets a part of each sequence attend to all of it, in place.

    Args:
        model: its `position_ids` are those in the whole sequence.
        part: of this rank.
        seq_len: number of tokens of a whole sequence.
        apart: whether documents do not see each other; then `position_ids` are those in the document.

    Errors:
        ConfigError: the tokens, the heads or the attention cannot be divided.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text, used = model.config.get_text_config(), model.config._attn_implementation
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


class _As:
    """A module of attention that uses a kernel of another name."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self.config = module, _Config(module.config, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Config:
    def __init__(self, config: Any, name: str) -> None:
        self._config, self._attn_implementation = config, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


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
    found_BTHD, _ = inner(_As(module, name), *given, attention_mask, **options)
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
            everywhere=True,
        )


def _mask(q_length: int, kv_length: int, *, count: int, places: _Places | None, inner: Any, **options: Any) -> Any:
    """Make a mask for all tokens."""
    if places is not None and places.whole_BT is not None:
        from transformers import masking_utils as masks

        # Instead of the one for this part, which the model has made of its positions.
        found = masks.find_packed_sequence_indices(places.whole_BT)
        documents = [] if found is None else [masks.packed_sequence_mask_function(found)]
        options["mask_function"] = masks.and_masks(masks.causal_mask_function, *documents)
        options["allow_is_causal_skip"] = not documents
    if options.get("attention_mask") is not None:
        raise TaskError("--parallel.cp does not support an attention mask of the task", expected="a causal model")
    return inner(q_length=count * q_length, kv_length=count * kv_length, **options)


def _check_mixing(model: Any) -> None:
    """Check on a few tokens that nothing but attention lets a token depend on others.

    Other layers, such as convolutions, and layers with a state, would see a part of the tokens only.

    Errors:
        ConfigError: without attention, the logits of a token depend on another one.
    """
    import torch
    from torch._subclasses import FakeTensor
    from transformers import AttentionInterface

    from hvdtrain.state.placeholder import Placeholder

    if any(isinstance(p, (Placeholder, FakeTensor)) for p in model.parameters()):
        return  # the rank with values checks for all
    used, modes = model.config._attn_implementation, {module: module.training for module in model.modules()}
    AttentionInterface.register("hvdtrain_nothing", _attend_to_nothing)
    ids = torch.arange(1, _TOKENS + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
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


def _attend_to_nothing(module: Any, query: torch.Tensor, key: Any, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return value.new_zeros(shape), None


def _refused(model: Any, found: str, instead: str = "") -> ConfigError:
    return ConfigError(
        f"--parallel.cp does not support {type(model).__name__}",
        expected="a causal language model of transformers without dropout, in which only attention mixes tokens, by"
        " sdpa or flash",
        found=found,
        next_step=f"{instead}use another model, or leave out --parallel.cp",
        everywhere=True,
    )
