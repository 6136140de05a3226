"""The task `language_model`: next-token prediction on text, by any causal language model from transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.task.base import Loss, Metrics, SequencePart, Task
from hvdtrain.task.text_config import ModelConfig, TextConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


def language_model(model: ModelConfig = ModelConfig(), data: TextConfig = TextConfig()) -> Task:  # noqa: B008
    """Train a causal language model on text.

    Args:
        model: architecture and initial weights
        data: training data

    Errors:
        TaskError: a library from the extra `lm` is missing, or cannot create the model.
        ConfigError: options conflict.
        DataError: data is missing, unreadable, empty, too short, or does not match the model.
    """
    from hvdtrain.task.causal_lm import causal_lm
    from hvdtrain.task.chunked_loss import returns_product_of_head
    from hvdtrain.task.corpus import open_corpus
    from hvdtrain.task.lora import add_adapters, parse_lora
    from hvdtrain.task.saved_model import find_model
    from hvdtrain.task.token_loss import chat_targets, joined_targets, mtp_metrics, separate_targets, token_loss

    lora = parse_lora(model.lora) if model.lora is not None else None  # before the data takes time
    source = find_model(model.from_, config=model.config) if model.from_ else None
    corpus = open_corpus(data, own_tokenizer=source.tokenizer() if source is not None else None)
    # Adapters need the digest of the weights, and separate documents a check of what they do.
    later = lora is None and not data.separate
    made = causal_lm(model, source, vocabulary=corpus.vocabulary, seq_len=data.seq_len, may_read_later=later)
    if lora is not None:
        add_adapters(made, lora)
    targets: Callable[[Any], Any] = joined_targets
    if data.chat:  # samples have marks
        targets = partial(chat_targets, apart=data.separate, config=made.config)
    elif corpus.end is not None:
        targets = partial(separate_targets, end=corpus.end, config=made.config)
    layers, chunks = model.mtp_layers, returns_product_of_head(made)
    loss = partial(token_loss, targets=targets, mtp=(layers, model.mtp_weight), chunks=chunks)
    metrics = partial(mtp_metrics, targets=targets, count=layers, chunks=chunks) if layers else None
    notes = [source.note] if source is not None else []
    notes += [corpus.note] if corpus.note else []
    return Task(
        model=made,
        loss=loss,
        metrics=metrics,
        train_data=corpus.train,
        heldout_data=corpus.heldout,
        nominal_weight=corpus.nominal_weight,
        unit="tokens",
        data_id=corpus.digest,
        remakes_frozen=lora is not None,
        files={**_model_files(made, adapters=lora is not None), **corpus.tokenizer},
        by_part=partial(_by_part, made, data, loss, metrics),
        prepare=partial(_prepare, made, model.attention, data, notes),
    )


def _by_part(
    model: nn.Module, data: TextConfig, loss: Callable[..., Any], metrics: Callable[..., Any] | None, part: SequencePart
) -> Loss | tuple[Loss, Metrics]:
    """Return the loss of a part of each sequence. Errors: ConfigError: the model cannot be divided."""
    from hvdtrain.task.sequence import divide_attention

    divide_attention(model, part, data.seq_len, apart=data.separate)
    own = partial(loss, part=part)
    return own if metrics is None else (own, partial(metrics, part=part))


def _prepare(
    model: nn.Module, wanted: str, data: TextConfig, notes: Sequence[str], device: torch.device, dtype: torch.dtype
) -> str:
    from hvdtrain.state.placeholder import Placeholder
    from hvdtrain.task.sequence import choose_attention
    from hvdtrain.task.token_loss import check_separation

    # FSDP gives values to rank 0 only, which checks for all.
    if data.separate and not any(isinstance(p, Placeholder) or p.is_meta for p in model.parameters()):
        check_separation(model)
    return "; ".join([*notes, choose_attention(model, wanted, device, dtype, tokens=data.seq_len)])


def _model_files(model: Any, *, adapters: bool) -> dict[str, bytes]:
    """Return the files that describe the model to transformers.

    Weights of adapters alone are no model to transformers: it would fill in random values. Then only `hvdtrain` reads
    the description, and its name says of what it is.
    """
    from hvdtrain.task.saved_model import BASE_CONFIG, CONFIG

    described = copy.deepcopy(model.config)
    described.architectures = [type(model).__name__]
    described.dtype = "float32"
    files = {BASE_CONFIG if adapters else CONFIG: described.to_json_string().encode()}
    if not adapters and (generation := getattr(model, "generation_config", None)) is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    return files
