"""A causal language model of transformers: a preset, a config.json, or the weights of a run or a folder."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.data.order import mix_seed
from hvdtrain.errors import CheckpointError, ConfigError, DataError, HvdtrainError, TaskError, listed
from hvdtrain.files import read_regular
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.frozen import FROZEN, find_frozen
from hvdtrain.state.placeholder import Placeholder, models_read_later
from hvdtrain.task.base import import_library
from hvdtrain.task.lora import add_adapters, merge_adapters, parse_lora
from hvdtrain.task.multi_token import OPTION, is_mtp_weight, is_supported, set_count, stored_count, with_mtp_layers
from hvdtrain.task.saved_model import SavedModel, files_of, find_model, is_of_other_trainer, model_to_read
from hvdtrain.task.text_config import ModelConfig, preset_config

_LARGEST_PRESET_VOCABULARY = 1 << 20
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def causal_lm(
    config: ModelConfig,
    source: SavedModel | None = None,
    *,
    vocabulary: int,
    seq_len: int,
    may_read_later: bool = False,
) -> nn.Module:
    """Create the model in float32 on the CPU. New weights depend only on torch's global seed.

    Args:
        config: architecture and initial weights.
        source: what `config.from_` names, if it has been looked for.
        vocabulary: one more than the largest id in the data.
        seq_len: tokens of a sample.
        may_read_later: whether placeholders that can be read will do, if the job supports them.

    Errors:
        TaskError: transformers is missing, or cannot create the model.
        ConfigError: options conflict, or a file does not describe a model.
        CheckpointError: the weights are damaged.
        DataError: the data's token ids or the sequence length are too large for the model.
    """
    import_library("transformers", "the language_model task", "lm")
    if config.config and config.from_ and not is_of_other_trainer(config.from_):
        raise ConfigError(
            "model.config and model.from conflict",
            expected="one of them: a config.json for new weights, or a run or folder with weights",
        )
    if config.from_ and source is None:
        source = find_model(config.from_, config=config.config)
    model_config = architecture(config, source, vocabulary, seq_len)
    _set_dropout(model_config, config.dropout)
    _check_mtp(config)
    set_count(model_config, config.mtp_layers)
    _check_fit(model_config, vocabulary, seq_len)
    # Others are chosen when the device is known.
    kernel = {"attn_implementation": "eager"} if config.attention == "eager" else {}
    try:
        auto = _kind(model_config)
        model: nn.Module | None = None
        later = models_read_later() if may_read_later else None
        if source is None:
            model = auto.from_config(model_config, dtype=torch.float32, trust_remote_code=False, **kernel)
        elif later is not None and not source.is_checkpoint:
            model = model_to_read(auto, source.folder, model_config, kernel)
            later += [model] if model is not None else []
        if source is not None and model is None:
            model = _with_weights(auto, source, read_weights(source), model_config, kernel)
    except HvdtrainError:
        raise
    except Exception as error:  # each model of transformers raises its own errors
        raise TaskError(
            f"transformers cannot create the model of {config.from_ or config.config or config.preset}",
            found=f"{type(error).__name__}: {error}",
            next_step="copy the folder of the model again" if type(error).__name__ == "SafetensorError" else None,
        ) from error
    assert model is not None
    model.train()
    return model


def architecture(config: ModelConfig, source: SavedModel | None, vocabulary: int, seq_len: int) -> Any:
    """Return the configuration of transformers. Errors: ConfigError, DataError."""
    if config.config:
        return read_config(Path(config.config), "--model.config")
    if source is not None:
        return read_config(source.config(), "--model.from")
    if vocabulary > _LARGEST_PRESET_VOCABULARY:
        raise DataError(
            f"the data has token ids up to {vocabulary - 1}, but the preset model has a vocabulary of"
            f" {_LARGEST_PRESET_VOCABULARY} at most",
            next_step="train a model with a larger vocabulary: --model.config",
        )
    rounded = -(-vocabulary // 64) * 64  # matrix products are faster with a multiple of 64 rows
    return preset_config(config.preset, vocabulary=rounded, positions=max(1024, seq_len))


def read_config(path: Path, option: str) -> Any:
    """Read a config.json that `option` names. Errors: ConfigError: it does not describe a model."""
    from transformers import AutoConfig

    try:
        content = json.loads(read_regular(path.expanduser()))
        return AutoConfig.for_model(content.pop("model_type"), **content)
    except Exception as error:  # no file, no JSON, an unknown model, an invalid value
        raise ConfigError(
            f"{path} does not describe a model",
            expected="a config.json of a causal language model that the installed transformers supports",
            found=f"{type(error).__name__}: {error}",
            next_step=f"correct {option}",
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


def _check_mtp(config: ModelConfig) -> None:
    for name, value in ((OPTION, config.mtp_layers), ("--model.mtp_weight", config.mtp_weight)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} is {value}, which is out of range", expected="0 or more")
    if config.mtp_layers and config.lora is not None:
        raise ConfigError(
            f"{OPTION} and --model.lora conflict",
            expected="one of them: adapters leave the model frozen, and new layers are trained whole",
        )


def _kind(model_config: Any) -> Any:
    """Return the class that makes models of this configuration."""
    transformers = import_library("transformers", "the language_model task", "lm")
    if not getattr(model_config.get_text_config(), "num_mtp_layers", 0):
        return transformers.AutoModelForCausalLM
    return with_mtp_layers(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)])


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


def load_model(source: SavedModel, *, mtp: bool = False) -> nn.Module:
    """Create a saved model as it is, in float32 on the CPU. Errors: see `causal_lm`.

    `mtp`: with its layers for multi-token prediction, if it has some.
    """
    import_library("transformers", "the language_model task", "lm")
    config = read_config(source.config(), "RUN")
    weights = read_weights(source)
    names = (weights or files_of(source.folder)) if mtp and is_supported(config) else ()
    set_count(config, stored_count(names, config))
    return _with_weights(_kind(config), source, weights, config, {})


def _with_weights(
    auto: Any, source: SavedModel, weights: dict[str, Tensor] | None, model_config: Any, kernel: dict[str, str]
) -> nn.Module:
    kind, place = auto, str(source.folder)
    if weights is not None:  # only a model's own class takes weights from memory
        with torch.device("meta"):
            kind, place = type(auto.from_config(model_config, trust_remote_code=False)), ""
    if not sys.stderr.isatty():  # each rank would show a bar
        import_library("transformers", "the language_model task", "lm").utils.logging.disable_progress_bar()
    model: nn.Module
    model, report = kind.from_pretrained(
        place or None,
        config=model_config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **({} if weights is None else {"state_dict": weights}),
        **kernel,
    )
    missing = sorted(report["missing_keys"])
    if stored_count(missing, model_config) == getattr(model_config.get_text_config(), "num_mtp_layers", 0):
        missing = [name for name in missing if not is_mtp_weight(name, model_config)]  # all of these layers are new
    unknown = sorted(name for name in report["unexpected_keys"] if not is_mtp_weight(name, model_config))
    if missing or (unknown and weights is not None):
        found, what = (missing, "no weights of") if missing else (unknown, "weights of unknown parameters")
        raise TaskError(
            f"the weights in {source.folder} are not those of the model",
            expected=f"weights of all parameters of a {model_config.model_type} model",
            found=f"{what} {listed(found)}",
        )
    if weights is not None:
        for tensor in chain(model.parameters(), model.buffers()):
            if not isinstance(tensor, Placeholder):
                tensor.data = tensor.data.clone()  # out of the mapped files
    return model


def read_weights(source: SavedModel) -> dict[str, Tensor] | None:
    """Return the whole tensors of a checkpoint by name, with adapters merged; None if `source` is another folder.

    Weights next to adapters are made as the run made them, from the options in its folder, and compared with the digest
    in the checkpoint.

    Errors: CheckpointError: it is damaged, or its adapters belong to other weights; ConfigError: the folder of the run
    with adapters has no config.yaml.
    """
    if not source.is_checkpoint:
        return None
    state = source.load()
    if not source.has_adapters:
        return dict(state.tensors["model"])
    config = RunLayout(source.folder.resolve().parent.parent).read_config()
    model = _base_model(config, source)
    stored = state.values[FROZEN]
    found = find_frozen(model)
    if found is not None and found.digest and found.digest != stored["digest"]:
        raise CheckpointError(
            f"the weights that the adapters in {source.folder} were trained with have changed",
            expected=f"frozen tensors with digest {stored['digest'][:12]}",
            found=f"digest {found.digest[:12]}",
            next_step="restore what the options model.* in the run's config.yaml name; relative paths refer to the"
            " folder where the run was started",
        )
    model.load_state_dict(state.tensors["model"], strict=False)
    merge_adapters(model)
    return dict(model.state_dict())


def _base_model(config: dict[str, Any], source: SavedModel) -> nn.Module:
    """Make the model of a run with new adapters, without its data."""
    names = {field.name.rstrip("_"): field.name for field in fields(ModelConfig)}
    options = ModelConfig(**{names[name]: value for name, value in config["model"].items() if name in names})
    described = read_config(source.config(), "--model.from").get_text_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix_seed(config["seed"], 0))
        model = causal_lm(options, vocabulary=described.vocab_size, seq_len=config["data"]["seq_len"])
        add_adapters(model, parse_lora(options.lora or ""))
    return model
