"""The weights of a run with `--model.lora`: its adapters added to the weights that they were trained with."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.data.order import mix_seed
from hvdtrain.errors import CheckpointError
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.frozen import FROZEN, find_frozen
from hvdtrain.task.causal_lm import ModelConfig, causal_lm, read_config
from hvdtrain.task.lora import add_adapters, merge_adapters, parse_lora
from hvdtrain.task.saved_model import SavedModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.state.pieces import StateDict


def merged_weights(source: SavedModel, state: StateDict) -> dict[str, Tensor]:
    """Return the tensors of a whole model by name. `state`: of the checkpoint in `source`.

    The weights that were frozen are made as the run made them, from the options in its folder, and compared with the
    digest in the checkpoint.

    Errors:
        ConfigError: the folder of the run has no config.yaml.
        CheckpointError: the frozen weights are others now.
    """
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
