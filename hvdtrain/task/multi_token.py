"""Multi-token prediction: layers after those of a model. Each predicts the token one place further ahead.

A layer gets the hidden states of the one before, and the embeddings of the tokens that one predicts: DeepSeek-AI,
DeepSeek-V3 Technical Report, arXiv 2412.19437, section 2.2. Embeddings and LM head are those of the model. Weights have
the names of DeepSeek-V3's published ones: `model.layers.61.eh_proj.weight` where the model has 61 layers.

`MtpModel` of transformers 5.23 is for drafts in generation. It is a second model with other names, so plans to divide
a model do not apply to it, and its loss adds to None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.errors import ConfigError, TaskError

OPTION = "--model.mtp_layers"

_COUNT = "num_mtp_layers"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_supported(config: Any) -> bool:
    """Return whether a model of this configuration can have layers for multi-token prediction, like its last layer."""
    text = config.get_text_config()
    return hasattr(text, _COUNT) and getattr(text, "layer_types", None) is None


def set_count(config: Any, count: int) -> None:
    """Set the number of layers for multi-token prediction in the configuration of a model.

    Errors: ConfigError: the model cannot have them.
    """
    text = config.get_text_config()
    if hasattr(text, _COUNT):
        setattr(text, _COUNT, count)
    if count and not is_supported(config):
        raise ConfigError(
            f"{OPTION} {count} does not support a model of type {config.model_type}",
            expected="a model with layers for multi-token prediction that are like its last layer, such as DeepSeek-V3",
            next_step=f"use another model, or {OPTION} 0",
        )


def is_mtp_weight(name: str, config: Any) -> bool:
    """Return whether a weight of this name belongs to a layer for multi-token prediction."""
    match = _LAYER.match(name)
    return match is not None and int(match[1]) >= config.get_text_config().num_hidden_layers


def stored_count(names: Iterable[str], config: Any) -> int:
    """Return how many layers for multi-token prediction are among the names of weights."""
    return sum(name.endswith(".eh_proj.weight") and is_mtp_weight(name, config) for name in names)


def with_mtp_layers(kind: Any) -> Any:
    """Return a class of models like `kind`, a causal language model of transformers, with its configuration's layers.

    Its `forward` also takes `mtp_ids`, for each layer the ids (B, T) of the tokens which the layer before predicts.
    It then returns the logits of the next token, and a list of those of each layer, (B, T, V).
    """
    from transformers.masking_utils import create_causal_mask

    class Model(kind):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = None

        @classmethod
        def from_config(cls, config: Any, *, trust_remote_code: bool = False, **options: Any) -> Any:
            return cls._from_config(config, **options)

        def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
            super().__init__(config, *arguments, **keywords)
            decoder, text = self.get_decoder(), config.get_text_config()
            layer, norm, first = _layer(type(decoder.layers[-1])), type(decoder.norm), len(decoder.layers)
            mtp_layers = [layer(text, first + number, norm) for number in range(text.num_mtp_layers)]
            with torch.no_grad():
                for each in mtp_layers:
                    each.apply(self._init_weights)
            decoder.layers.extend(mtp_layers)

        @wraps(kind.forward)
        def forward(self, *arguments: Any, mtp_ids: Sequence[Tensor] | None = None, **keywords: Any) -> Any:
            if mtp_ids is None:
                return super().forward(*arguments, **keywords)
            hidden: list[Tensor] = []
            hook = self.get_decoder().register_forward_hook(lambda _, inputs, out: hidden.append(out[0]))
            try:
                logits = super().forward(*arguments, **keywords).logits
            finally:
                hook.remove()
            return logits, self._mtp_logits(hidden[0], mtp_ids, keywords.get("position_ids"))

        def _mtp_logits(self, hidden_BTD: Tensor, ids: Sequence[Tensor], places_BT: Tensor | None) -> list[Tensor]:
            decoder, embed, head = self.get_decoder(), self.get_input_embeddings(), self.get_output_embeddings()
            if places_BT is None:
                places_BT = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)[None]
            options = {
                "position_embeddings": decoder.rotary_emb(hidden_BTD, places_BT),
                "attention_mask": create_causal_mask(
                    config=self.config,
                    inputs_embeds=hidden_BTD,
                    attention_mask=None,
                    past_key_values=None,
                    position_ids=places_BT,
                ),
                "position_ids": places_BT,
            }
            logits = []
            for layer, ids_BT in zip(decoder.layers[-len(ids) :], ids, strict=True):
                hidden_BTD = layer(hidden_BTD, embed(ids_BT), **options)
                logits.append(head(hidden_BTD))
            return logits

    return _named_as(kind, Model)


def _layer(kind: Any) -> Any:
    class Layer(kind):  # type: ignore[misc]
        takes_embeddings = True  # after the model's last layer

        def __init__(self, config: Any, index: int, norm: Any) -> None:
            super().__init__(config, index)
            width, eps = config.hidden_size, config.rms_norm_eps
            self.enorm, self.hnorm = norm(width, eps=eps), norm(width, eps=eps)
            self.eh_proj = nn.Linear(2 * width, width, bias=False)
            self.shared_head = nn.ModuleDict({"norm": norm(width, eps=eps)})

        def forward(self, hidden_BTD: Tensor, embeds_BTD: Tensor | None = None, **options: Any) -> Tensor:
            if embeds_BTD is None:
                raise TaskError(
                    f"the model runs all of its layers, with those for multi-token prediction ({OPTION})",
                    expected="a model that runs the first num_hidden_layers of them",
                    next_step=f"use another model, or {OPTION} 0",
                )
            both = torch.cat([self.enorm(embeds_BTD), self.hnorm(hidden_BTD)], dim=-1)
            found: Tensor = self.shared_head["norm"](super().forward(self.eh_proj(both), **options))
            return found

    return _named_as(kind, Layer)


def _named_as(kind: type, made: type) -> type:
    # transformers knows conversions of weights and parts of a model by the names of classes.
    made.__name__, made.__qualname__, made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return made
