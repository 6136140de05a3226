"""How unevenly routers of a mixture of experts choose, counted by hooks that cost nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.training.diagnostics.experts import make_routers


class Gate(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(chosen), self.experts), chosen


class Moe(nn.Module):
    def __init__(self, experts: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": Gate(experts)}) for _ in range(layers))
        self.gate_proj = nn.Linear(2, 2)

    def forward(self, *chosen: Tensor) -> None:
        for layer, mine in zip(self.layers, chosen, strict=True):
            layer["gate"](mine)


EVEN = torch.tensor([[0, 1], [2, 3]])
UNEVEN = torch.tensor([[0, 1], [0, 2]])


def _share(model: nn.Module, *passes: Any) -> float:
    """The share of the busiest expert in a recorded step of these forward passes."""
    routers = make_routers(model)
    assert routers is not None and math.isnan(routers.pop_share())
    routers.begin()
    for each in passes:
        each()
    routers.end()
    found = routers.pop_share()
    assert math.isnan(routers.pop_share())
    assert not any(module._forward_hooks for module in model.modules())
    return found


def test_the_most_uneven_router_counts_over_all_micro_batches() -> None:
    model = Moe()
    assert _share(model, lambda: model(EVEN, UNEVEN), lambda: model(EVEN, EVEN)) == pytest.approx(3 / 8)


def test_outside_of_a_recorded_step_nothing_is_counted() -> None:
    model = Moe()
    assert math.isnan(_share(model))
    model(UNEVEN, UNEVEN)
    model.eval()
    assert math.isnan(_share(model, lambda: model(UNEVEN, UNEVEN))), "an evaluation"


class Weights(nn.Module):
    """A router that tells weights of the chosen ones alone, not how many experts there are."""

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return chosen, torch.ones_like(chosen, dtype=torch.float32)


@pytest.mark.parametrize("chosen", [[[61, 3], [7, 2]], [[0, -1], [1, 0]]])
def test_numbers_that_are_no_experts_cost_the_figure_not_the_training(chosen: list[list[int]]) -> None:
    model = nn.ModuleDict({"gate": Weights()})
    passes = [torch.tensor(chosen), torch.tensor([[5, 1, 2], [0, 3, 4]])]
    assert math.isnan(_share(model, *(lambda each=each: model["gate"](each) for each in passes)))


@pytest.mark.filterwarnings("ignore")  # torch's own, about what it imports for compiling
def test_models_without_routers_and_compiled_ones_are_left_alone() -> None:
    assert make_routers(nn.Sequential(nn.Linear(2, 2))) is None
    model = Moe()
    model.layers[0].compile()
    assert make_routers(model) is None


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe", "gpt_oss"])
def test_routers_of_transformers_are_found(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    options = {
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 0},
        **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "pad_token_id": 0},
        **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 8),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **options))
    assert 1 / 4 <= _share(model.train(), lambda: model(torch.arange(32).reshape(2, 16))) <= 1 / 2
