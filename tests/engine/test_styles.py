"""Which modules a plan divides, and what is refused before training."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.solo import ImaginedComm
from hvdtrain.engine import fsdp_layout
from hvdtrain.engine.division import divide_model
from hvdtrain.engine.refusals import refuse
from hvdtrain.engine.styles import PARTIAL, styles_of
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import Plan
from hvdtrain.task.lora import add_adapters, parse_lora
from tests.support.divided_models import divided


def _model(**options: Any) -> Any:
    return divided(**options).model


def test_heads_of_latent_attention_are_divided() -> None:
    """transformers' plan of DeepSeek-V3 leaves them out."""
    tensors, experts = styles_of(_model(), {}, Dimensions(2, 1))
    attention = {name: style for name, style in tensors.items() if name.startswith("model.layers.1.self_attn.")}
    styles = {name.removeprefix("model.layers.1.self_attn."): style for name, style in attention.items()}
    assert styles == {
        **{f"{name}{weight}": "colwise" for name in ("q_b_proj", "kv_b_proj") for weight in ("", ".weight")},
        **{f"o_proj{weight}": "rowwise" for weight in ("", ".weight")},
        "kv_a_proj_with_mqa": "mla_kv_a_proj",
    }
    assert experts["model.layers.1.mlp.experts"] == "ep_dispatch_experts"
    assert not any("experts." in name and "shared" not in name for name in tensors)


def test_parts_of_parameters_are_made_before_the_exchange_of_their_tokens() -> None:
    """An exchange of tokens reads how many experts its module has left."""
    names = [*styles_of(_model(), {}, Dimensions(1, 2))[1]]
    assert names.index("model.layers.1.mlp.experts.down_proj") < names.index("model.layers.1.mlp.experts")
    assert styles_of(_model(), {}, Dimensions(1, 2))[0] == {}


def test_the_plan_of_a_task_replaces_that_of_the_model() -> None:
    own = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.experts": "ep_dispatch_experts"}
    tensors, experts = styles_of(_model(), own, Dimensions(2, 2))
    assert tensors == {"model.layers.0.mlp.up_proj": "colwise", "model.layers.0.mlp.up_proj.weight": "colwise"}
    assert experts == {"model.layers.1.mlp.experts": "ep_dispatch_experts"}


def test_experts_that_are_divided_by_expert_are_not_divided_again() -> None:
    own = {"lm_head": "colwise_gather_output", "model.layers.*.mlp.experts": "ep_dispatch_experts"}
    own |= {"model.layers.*.mlp.experts.down_proj": "rowwise"}
    assert {*styles_of(_model(), own, Dimensions(2, 2))[0]} == {"lm_head", "lm_head.weight"}


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    parts: Any = SimpleNamespace(plan=Plan(dimensions=Dimensions(1, 2)))
    with pytest.raises(ConfigError, match=r"--parallel.ep 2 needs a newer transformers(?s:.*)expected: transformers 5"):
        divide_model(parts, [])


def test_ranks_that_share_a_gpu_divide_no_experts() -> None:
    task = divided()
    comm: Any = ImaginedComm(2)
    comm.through_host = True
    parts: Any = SimpleNamespace(
        comm=comm,
        plan=Plan(dimensions=Dimensions(1, 2)),
        model=task.model,
        parameters=list(task.model.named_parameters()),
    )
    with pytest.raises(ConfigError, match=r"--parallel.ep 2, but ranks share a GPU"):
        refuse(parts)


def _adapted(more: str = ",dropout=0.1") -> Any:
    model = _model(kind="llama")
    add_adapters(model, parse_lora(f"rank=2{more}"))
    return model


@pytest.mark.parametrize(("layer", "divided"), [("q_proj", "lora_B"), ("o_proj", "lora_A")])
def test_the_adapter_with_the_sides_of_its_layer_is_divided_alike(layer: str, divided: str) -> None:
    own = f"model.layers.1.self_attn.{layer}"
    found = {name: style for name, style in styles_of(_adapted(""), {}, Dimensions(2))[0].items() if own in name}
    layers = (f"{own}.base_layer", f"{own}.{divided}.default")
    assert found.keys() == {*layers, *(f"{each}.weight" for each in layers)}
    assert {*found.values()} == {"colwise" if divided == "lora_B" else "rowwise"}


def _dropping() -> Any:
    model = _model()
    model.config.attention_dropout = 0.1
    return model


@pytest.mark.parametrize(
    ("make", "dimensions", "text", "expected"),
    [
        (lambda: nn.Linear(2, 2), Dimensions(2, 1), "Linear has no plan of tensor", "tp_plan"),
        (lambda: nn.Linear(2, 2), Dimensions(1, 2), "Linear has no plan of expert", "ep_plan"),
        (lambda: _model(kind="llama"), Dimensions(1, 2), "no plan of expert", "DeepSeek-V3"),
        (_model, Dimensions(3, 1), "3 ranks .* 4 num_attention_heads", "1, 2, 4"),
        (_model, Dimensions(1, 3), "--parallel.ep: 3 ranks .* 8 experts", "1, 2, 4, 8"),
        (_model, Dimensions(4, 16), "--parallel.ep: 16 ranks .* 8 experts", "1, 2, 4, 8"),
        (_adapted, Dimensions(2, 1), r"dropout of inputs of model\.layers\.0\.self_attn\.o_proj", "no dropout"),
        (_dropping, Dimensions(2, 1), "dropout of attention", "no dropout"),
    ],
)
def test_what_cannot_be_divided_is_refused(make: Any, dimensions: Dimensions, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        styles_of(make(), {}, dimensions)
    assert expected in str(caught.value.expected)


def test_two_matrices_in_one_are_refused() -> None:
    """A part of theirs is no box of the parameter."""
    with pytest.raises(ConfigError, match="up_proj"):
        styles_of(_model(), {"model.layers.*.mlp.up_proj": "packed_colwise"}, Dimensions(2, 1))


def test_dropout_of_attention_does_not_keep_experts_from_ranks() -> None:
    assert styles_of(_dropping(), {}, Dimensions(1, 2))[1]


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        (Dimensions(2), "divides parts among the ranks with copies of them"),
        (Dimensions(3), "do not have the dimensions"),
    ],
)
def test_what_fsdp_cannot_divide_further_is_refused(dimensions: Dimensions, message: str) -> None:
    task = divided()
    parts: Any = SimpleNamespace(
        comm=ImaginedComm(2), plan=Plan("fsdp", dimensions=dimensions), model=task.model, optimizer=task.optimizer,
        parameters=list(task.model.named_parameters()), weights=None,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        refuse(parts)


def test_experts_are_in_modules_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are gathered among other ranks."""
    monkeypatch.setattr(fsdp_layout, "_is_of_experts", lambda parameter, *_: parameter.dim() == 3)
    model = nn.ModuleDict({"block": nn.ModuleDict({"experts": nn.Module(), "norm": nn.LayerNorm(2)})})
    experts: Any = model["block"]["experts"]  # type: ignore[index]
    experts.matrices = nn.Parameter(torch.zeros(2, 2, 2))
    names = {module: name for name, module in model.named_modules()}
    assert fsdp_layout._modules_of_experts(model["block"], 2, "parts/1", names) == [experts]
    experts.bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ConfigError, match=r"block.experts has experts, and other parameters(?s:.*)found: bias"):
        fsdp_layout._modules_of_experts(model["block"], 2, "parts/1", names)


@pytest.mark.parametrize(
    ("plan", "given", "has_part"),
    [({"q_proj": "colwise"}, {}, True), ({"q_proj": "colwise", "q_norm": "sequence_parallel"}, {}, False),
     ({"q_proj": "colwise_gather_output"}, {}, False), ({}, {"layers.*.q_proj": "colwise"}, False)],
)  # fmt: skip
def test_norms_of_heads_have_a_part_of_their_gradient(
    plan: dict[str, str], given: dict[str, str], has_part: bool
) -> None:
    """Also where the plan of the model leaves them out, not that of a task. Activations may have parameters, too."""
    model: Any = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict()])})
    model["layers"][0].update({"q_proj": nn.Linear(4, 4), "q_norm": nn.RMSNorm(2)})
    model["layers"][0].update({"up_proj": nn.Linear(4, 4), "act_fn": nn.PReLU()})
    model.tp_plan = {f"layers.*.{name}": style for name, style in {**plan, "up_proj": "colwise"}.items()}
    tensors, _ = styles_of(model, given, Dimensions(2))
    assert (tensors.get("layers.0.q_norm") == PARTIAL) == has_part
    assert (tensors.get("layers.0.act_fn") == PARTIAL) == (not given)
    model["layers"][0]["act_fn"] = nn.SiLU()
    assert "layers.0.act_fn" not in styles_of(model, given, Dimensions(2))[0]
