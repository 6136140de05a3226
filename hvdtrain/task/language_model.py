"""The task `language_model`: next-token prediction on text.

The model is a causal language model from transformers: a preset, a config.json or a pretrained folder.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import ConfigError, DataError, TaskError
from hvdtrain.files import read_regular
from hvdtrain.task.attention import choose_attention
from hvdtrain.task.base import Task, import_library
from hvdtrain.task.corpus import TextConfig, open_corpus
from hvdtrain.task.lora import add_adapters, parse_lora
from hvdtrain.task.presets import preset_config

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and initial weights.

    Attributes:
        preset: DeepSeek-V3 with latent attention and a mixture of experts: tiny (for tests), small (7 million
            parameters), 125m, 1b (0.2 billion of them active for each token), 16b (2.2 billion active) or 671b (36
            billion active). The vocabulary depends on the data, and is not counted here
        config: train another architecture with new weights: config.json of any causal language model that transformers
            supports (default: model.preset)
        pretrained: train from existing weights: folder with config.json and safetensors files (default: model.preset)
        dropout: dropout rate of the attention weights (default: the model's own)
        attention: kernel of attention: flash (the flash_attn library, on GPUs in bf16 or fp16), sdpa (torch's), eager
            (whole scores in memory), or auto: the first of these that works
        lora: freeze the model, and train low-rank matrices next to its linear layers: rank=16, or
            rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj. Checkpoints contain only these matrices (default: train
            the whole model; alpha twice the rank, no dropout, all linear layers but the LM head)
    """

    preset: Literal["tiny", "small", "125m", "1b", "16b", "671b"] = "small"
    config: str | None = None
    pretrained: str | None = None
    dropout: float | None = None
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    lora: str | None = None


CONFIG, BASE_CONFIG = "config.json", "base_config.json"
"""Files of a checkpoint that describe the model; the second one if the checkpoint has only adapters of it."""

_LARGEST_PRESET_VOCABULARY = 1 << 20
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


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
    lora = parse_lora(model.lora) if model.lora is not None else None  # before the data takes time
    corpus = open_corpus(data, own_tokenizer=_own_tokenizer(model))
    made = causal_lm(model, vocabulary=corpus.train.file.vocabulary, seq_len=data.seq_len)
    if lora is not None:
        add_adapters(made, lora)
    return Task(
        model=made,
        loss=next_token_loss,
        train_data=corpus.train,
        heldout_data=corpus.heldout,
        nominal_weight=float(data.seq_len),
        unit="tokens",
        data_id=corpus.train.file.digest,
        remakes_frozen=lora is not None,
        files={**_model_files(made, adapters=lora is not None), **corpus.tokenizer},
        prepare=partial(choose_attention, made, model.attention),
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


def _model_files(model: Any, *, adapters: bool) -> dict[str, bytes]:
    """Return the files that describe the model to transformers.

    Weights of adapters alone are no model to transformers: it would fill in random values. Then only `hvdtrain` reads
    the description, and its name says of what it is.
    """
    described = copy.deepcopy(model.config)
    described.architectures = [type(model).__name__]
    described.dtype = "float32"
    files = {BASE_CONFIG if adapters else CONFIG: described.to_json_string().encode()}
    if not adapters and (generation := getattr(model, "generation_config", None)) is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def _own_tokenizer(model: ModelConfig) -> str | None:
    """Return the tokenizer in the folder of a pretrained model, or None."""
    file = Path(model.pretrained or "").expanduser() / "tokenizer.json"
    return str(file) if model.pretrained and file.is_file() else None


def causal_lm(config: ModelConfig, *, vocabulary: int, seq_len: int) -> nn.Module:
    """Create the model in float32 on the CPU. New weights depend only on torch's global seed.

    `vocabulary` is one more than the largest id in the data.

    Errors:
        TaskError: transformers is missing, or cannot create the model.
        ConfigError: options conflict, or a file does not describe a model.
        DataError: the data's token ids or the sequence length are too large for the model.
    """
    import torch

    transformers = import_library("transformers", "the language_model task", "lm")
    if config.config and config.pretrained:
        raise ConfigError(
            "model.config and model.pretrained conflict",
            expected="one of them: a config.json for new weights, or a folder with weights",
        )
    model_config = _model_config(config, vocabulary, seq_len)
    _set_dropout(model_config, config.dropout)
    _check_fit(model_config, vocabulary, seq_len)
    # Others are chosen when the device is known.
    kernel = {"attn_implementation": "eager"} if config.attention == "eager" else {}
    try:
        auto = transformers.AutoModelForCausalLM
        if config.pretrained:
            model = _pretrained(auto, Path(config.pretrained), model_config, kernel)
        else:
            model = auto.from_config(model_config, dtype=torch.float32, trust_remote_code=False, **kernel)
    except TaskError:
        raise
    except Exception as error:  # each model of transformers raises its own errors
        raise TaskError(
            f"transformers cannot create the model of {config.pretrained or config.config or config.preset}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    model.train()
    return model


def _model_config(config: ModelConfig, vocabulary: int, seq_len: int) -> Any:
    if config.config or config.pretrained:
        return _read_config(Path(config.config) if config.config else Path(config.pretrained or "") / "config.json")
    if vocabulary > _LARGEST_PRESET_VOCABULARY:
        raise DataError(
            f"the data has token ids up to {vocabulary - 1}, but the preset model has a vocabulary of"
            f" {_LARGEST_PRESET_VOCABULARY} at most",
            next_step="train a model with a larger vocabulary: --model.config",
        )
    rounded = -(-vocabulary // 64) * 64  # matrix products are faster with a multiple of 64 rows
    return preset_config(config.preset, vocabulary=rounded, positions=max(1024, seq_len))


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        content = json.loads(read_regular(path.expanduser()))
        return AutoConfig.for_model(content.pop("model_type"), **content)
    except Exception as error:  # no file, no JSON, an unknown model, an invalid value
        raise ConfigError(
            f"{path} does not describe a model",
            expected="a config.json of a causal language model that the installed transformers supports",
            found=f"{type(error).__name__}: {error}",
            next_step="correct --model.config or --model.pretrained",
        ) from error


def _set_dropout(model_config: Any, dropout: float | None) -> None:
    if dropout is None:
        return
    if not 0 <= dropout < 1:
        raise ConfigError(f"--model.dropout is {dropout}, which is out of range", expected="0 or more, and less than 1")
    name = next((name for name in _DROPOUT_NAMES if hasattr(model_config, name)), None)
    if not name:
        raise ConfigError(
            f"a model of type {model_config.model_type} has no dropout of attention weights",
            next_step="omit --model.dropout",
        )
    setattr(model_config, name, dropout)


def _check_fit(model_config: Any, vocabulary: int, seq_len: int) -> None:
    text_config = model_config.get_text_config()
    ids = getattr(text_config, "vocab_size", None)
    if ids and vocabulary > ids:  # a model without a vocabulary fails later, when it is created
        raise DataError(
            "the model's vocabulary is too small for the data",
            expected=f"a vocabulary of {vocabulary} or more",
            found=f"a vocabulary of {ids}",
            next_step="use the model's own tokenizer (--data.tokenizer), or a model with a larger vocabulary",
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions and seq_len > positions:
        raise DataError(
            "data.seq_len is too large for the model",
            expected=f"at most {positions}",
            found=str(seq_len),
            next_step=f"use --data.seq_len {positions}",
        )


def _pretrained(auto: Any, folder: Path, model_config: Any, kernel: dict[str, str]) -> nn.Module:
    import torch

    model: nn.Module
    model, report = auto.from_pretrained(
        folder.expanduser(),
        config=model_config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **kernel,
    )
    if missing := sorted(report["missing_keys"]):
        raise TaskError(
            f"the pretrained folder {folder} is incomplete",
            expected=f"weights of all parameters of a {model_config.model_type} model",
            found=f"no weights of {', '.join(missing[:3])}" + (f" and {len(missing) - 3} more" if missing[3:] else ""),
        )
    return model
