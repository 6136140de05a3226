"""The task `language_model`: next-token prediction on text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.task.base import Task
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.corpus import TextConfig, open_corpus

if TYPE_CHECKING:
    from torch import Tensor, nn


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
    corpus = open_corpus(data, own_tokenizer=_own_tokenizer(model))
    return Task(
        model=causal_lm(model, vocabulary=corpus.vocabulary, seq_len=data.seq_len),
        loss=next_token_loss,
        train_data=corpus.train,
        heldout_data=corpus.heldout,
        nominal_weight=float(data.seq_len),
        unit="tokens",
        data_id=corpus.digest,
    )


def next_token_loss(model: nn.Module, tokens_BT: Any) -> tuple[Tensor, float]:
    """Return the summed cross entropy of each token, given the tokens before it.

    Args:
        model: takes `input_ids`, returns an object with `logits`.
        tokens_BT: ids (B, T + 1), int64.

    Returns:
        The sum over B * T predicted tokens in nats, in float32 for any dtype of logits; and B * T.
    """
    from torch.nn.functional import cross_entropy

    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    # Slice the ids, not the logits: these are as large as all other memory, and slicing would copy them.
    loss = cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")
    return loss, float(targets_BT.numel())


def _own_tokenizer(model: ModelConfig) -> str | None:
    """Return the tokenizer in the folder of a pretrained model, or None."""
    file = Path(model.pretrained or "").expanduser() / "tokenizer.json"
    return str(file) if model.pretrained and file.is_file() else None
