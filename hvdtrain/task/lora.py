"""LoRA (Hu et al. 2021, arXiv 2106.09685): train small low-rank matrices next to the linear layers of a frozen model.

The layers are those of the peft library. Its "all-linear" is not used: with transformers 5 it takes the names of dense
MLPs in models with experts for those of experts, and adapts others than it says.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hvdtrain.errors import ETC, ConfigError, listed
from hvdtrain.task.base import import_library

_FORM = "rank=16, or rank=16,alpha=32,dropout=0.05,targets=q_proj+v_proj"
_SHOWN = 12  # names of layers in an error


@dataclass(frozen=True)
class LoraOptions:
    """What `--model.lora` says."""

    rank: int  # of the added matrices
    alpha: float  # their product is multiplied by alpha / rank
    dropout: float = 0.0  # rate of dropout on their input
    targets: tuple[str, ...] = ()  # last parts of the names of layers; empty for all linear layers but the LM head


def parse_lora(text: str) -> LoraOptions:
    """Read the value of `--model.lora`. Errors: ConfigError: it has another form, or a number is out of range."""
    parts = [part.partition("=") for part in text.split(",")]
    given = {name.strip(): value.strip() for name, _, value in parts}
    if len(given) < len(parts) or not all(equals for _, equals, _ in parts):
        raise _invalid(text, f"names and values: {_FORM}")
    if unknown := sorted(given.keys() - _READ.keys()):
        raise _invalid(text, f"only the names {', '.join(_READ)}", unknown[0])
    if "rank" not in given:
        raise _invalid(text, f"a rank: {_FORM}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        read, is_valid, expected = _READ[name]
        try:
            values[name] = read(value)
        except ValueError:
            values[name] = None
        if values[name] is None or not is_valid(values[name]):
            raise _invalid(text, f"{name} is {expected}", value)
    return LoraOptions(**{"alpha": 2.0 * values["rank"], **values})


_READ: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    "rank": (int, lambda rank: rank >= 1, "a whole number of 1 or more"),
    "alpha": (float, lambda factor: 0 < factor < math.inf, "a number above 0"),
    "dropout": (float, lambda rate: 0 <= rate < 1, "0 or more, and less than 1"),
    "targets": (lambda text: tuple(text.split("+")), all, "the names of layers, such as q_proj+v_proj"),
}
"""By name: how to read a value, when it is valid, and what is expected."""


def _invalid(text: str, expected: str, found: str | None = None) -> ConfigError:
    return ConfigError(f"invalid --model.lora {text!r}", expected=expected, found=found)


def add_adapters(model: nn.Module, options: LoraOptions) -> None:
    """Freeze the model, and add trained matrices to its linear layers, in place.

    The model keeps its class; parameters get peft's names, such as ``o_proj.base_layer.weight`` and
    ``o_proj.lora_A.default.weight``. New matrices depend on torch's global seed, and change no output.

    Errors: TaskError: peft is missing; ConfigError: the model has no such layers.
    """
    peft = import_library("peft", "--model.lora", "lm")
    holder = nn.Module()  # peft converts the names of layers in models that have a config
    holder.model = model
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=[f"model.{name}" for name in find_targets(model, options.targets)],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # of GPT-2's layers: peft corrects it
        peft.inject_adapter_in_model(config, holder)


def merge_adapters(model: nn.Module) -> None:
    """Add the trained matrices of `add_adapters` to the layers' weights, and remove them, in place."""
    layer_type = import_library("peft.tuners.lora", "--model.lora", "lm").LoraLayer
    for name, layer in [(name, each) for name, each in model.named_modules() if isinstance(each, layer_type)]:
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())


def find_targets(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Return the names of the layers to adapt.

    Errors: ConfigError: there are none for one of the `targets`, or no linear layers.
    """
    conv1d = import_library("transformers.pytorch_utils", "--model.lora", "lm").Conv1D  # GPT-2's linear layer
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = model.named_modules()
    linear = [name for name, each in modules if isinstance(each, (nn.Linear, conv1d)) and each is not head]
    if not linear:
        raise ConfigError(
            "--model.lora, but the model has no linear layers to adapt",
            expected="nn.Linear besides the LM head",
            found=type(model).__name__,
            next_step="omit --model.lora",
        )
    if not targets:
        return linear
    found = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    missing = [target for target, names in found.items() if not names]
    if missing:
        known = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"--model.lora: the model has no linear layer {missing[0]!r}",
            expected=f"targets among {listed(known, _SHOWN, ETC)}",
            next_step="omit targets to adapt all linear layers",
        )
    wanted = {name for names in found.values() for name in names}
    return [name for name in linear if name in wanted]
