"""How the modules of a model are divided among ranks: the plans of transformers' models, or of a task.

A plan maps names of modules or parameters, with ``*`` for the number of a layer, to styles of transformers'
`ALL_PARALLEL_STYLES`: "colwise", "rowwise", "ep_dispatch_experts".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from hvdtrain.comm.dimensions import Dimensions, check_divides
from hvdtrain.errors import ConfigError

EXPERT_STYLES = ("ep_dispatch_experts", "grouped_gemm")
"""Styles of a module of experts, and of its parameters, that are divided by expert."""

_LATENT = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
"""Multi-head latent attention, which plans of transformers leave out for some models: heads are divided."""

PARTIAL = "replicated_with_grad_allreduce"
"""Style of parameters that ranks have whole, but with a part of the gradient, such as norms of heads."""
_AFTER = {"q_norm": "q_proj", "k_norm": "k_proj", "act_fn": "up_proj"}
"""Modules with parameters, by name, that see only the output of another one: plans of some models leave them out."""

_NEXT_STEP = "use a model with a plan, give the Task one (Task.plan), or leave out the option"


def styles_of(
    model: nn.Module, own: Mapping[str, str], dimensions: Dimensions
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the styles by name of what tp divides, and of the experts; `own` is the plan of the task, or empty.

    Errors: ConfigError: the model has no plan, or its sizes cannot be divided.
    """
    tensors = dict(own or getattr(model, "tp_plan", None) or {})
    experts = dict(own or getattr(model, "ep_plan", None) or {})
    tensors = {name: style for name, style in tensors.items() if style not in EXPERT_STYLES}
    experts = {name: style for name, style in experts.items() if style in EXPERT_STYLES}
    expert_styles = _by_name(model, experts)
    within = tuple(f"{name}." for name in expert_styles)
    tensor_styles = {}
    if dimensions.tp > 1:
        found = _by_name(model, tensors)
        found |= {} if own else _latent_attention(model) | _after_divided(model, found)
        found = _with_adapters(model, found)
        tensor_styles = {n: s for n, s in found.items() if n not in expert_styles and not n.startswith(within)}
    for option, ranks, styles, what in (
        ("--parallel.tp", dimensions.tp, tensor_styles, "tensor"),
        ("--parallel.ep", dimensions.ep, expert_styles, "expert"),
    ):
        if ranks > 1 and not styles:
            raise ConfigError(
                f"{option} {ranks}, but {type(model).__name__} has no plan of {what} parallelism",
                expected=f"a causal language model of transformers with a {what[0]}p_plan"
                + (", such as DeepSeek-V3" if what == "expert" else ""),
                next_step=_NEXT_STEP,
            )
    _check_sizes(model, dimensions, tensor_styles, expert_styles)
    return tensor_styles, expert_styles


def _by_name(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of parameters and modules; a module's style is that of its parameters, too.

    Parameters come first: an exchange of tokens looks at how many experts a module has left.
    """
    found = {}
    for name, _ in [*model.named_parameters(), *model.named_modules()]:
        pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        module, _, last = pattern.rpartition(".")
        style = plan.get(pattern, plan.get(module) if last in ("weight", "bias") else None)
        if style is not None:
            found[name] = style
    return found


def _latent_attention(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "kv_a_proj_with_mqa"):
            for child, style in _LATENT.items():
                if getattr(module, child, None) is not None:
                    found[f"{name}.{child}"] = style
                    if style != "mla_kv_a_proj":
                        found[f"{name}.{child}.weight"] = style
    return found


def _after_divided(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of modules of `_AFTER` that have none, where the other one is divided by columns."""
    found = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        is_unplanned = last in _AFTER and name not in styles and any(True for _ in module.parameters())
        if is_unplanned and styles.get(f"{parent}.{_AFTER[last]}") == "colwise":
            found[name] = PARTIAL
    return found


def _with_adapters(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return styles in which layers with adapters of peft divide their matrix, and that adapter which has its sides.

    The other one is whole on all ranks, as what it multiplies is: A of a layer that is divided by columns, B by rows.
    """
    found = dict(styles)
    for name, module in model.named_modules():
        style = styles.get(name, "")
        sides = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style.partition("_")[0])
        if sides is not None and hasattr(module, "base_layer"):
            found.pop(f"{name}.weight", None)
            del found[name]
            for layer in (f"{name}.base_layer", f"{name}.{sides}.default"):
                parameters = [f"{layer}.{each}" for each, _ in model.get_submodule(layer).named_parameters()]
                found |= dict.fromkeys([*parameters, layer], style)
    return found


def _check_sizes(
    model: nn.Module, dimensions: Dimensions, tensors: Mapping[str, str], experts: Mapping[str, str]
) -> None:
    packed = [name for name, style in tensors.items() if style.startswith("packed")]
    if packed:
        raise ConfigError(
            f"--parallel.tp {dimensions.tp} does not support {packed[0]}: it packs two matrices into one",
            expected="one matrix for each layer",
            next_step="use another model, or leave out the option",
        )
    config: Any = getattr(model, "config", None)
    drops = {"attention weights": getattr(config, "attention_dropout", 0.0)} if tensors else {}
    drops |= {
        f"inputs of {name}, which are divided": module.p
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and name.replace(".lora_dropout.", ".lora_A.") in tensors
    }
    for what, dropout in drops.items():
        if dropout:
            raise ConfigError(
                f"--parallel.tp {dimensions.tp} does not support dropout of {what}",
                expected="no dropout there: each rank would drop others, so the loss would depend on the number of"
                " ranks",
                found=f"a dropout of {dropout:g}",
                next_step="--model.dropout 0, --model.lora without dropout, or leave out --parallel.tp",
            )
    if tensors and config is not None:
        text = config.get_text_config()
        for name in ("num_attention_heads", "num_key_value_heads"):
            check_divides("--parallel.tp", dimensions.tp, getattr(text, name, None) or 0, f"{name} of the model")
    for name, style in experts.items():
        if style == "ep_dispatch_experts":
            option = "--parallel.ep" if dimensions.ep > 1 else "--parallel.tp"
            count = getattr(model.get_submodule(name), "num_experts", 0)
            check_divides(option, dimensions.experts, count, "experts of the model")
