"""Operations counted against formulas; a count leaves no trace; peaks by the names that devices have."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.observe.flops import count_flops, peak_tflops, untouched

CPU = torch.device("cpu")


def test_a_linear_layer_takes_two_operations_a_weight_and_row() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    assert count_flops(lambda: model(torch.ones(5, 6))) == 2 * 5 * (6 * 16 + 16 * 1)


def test_attention_on_the_cpu() -> None:
    q = torch.randn(2, 3, 8, 4)
    with torch.no_grad():
        found = count_flops(lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    assert found == 2 * (2 * 2 * 3 * 8 * 8 * 4)


@pytest.mark.parametrize("splits", [[4, 4], [1, 7]])
def test_a_mixture_of_experts_takes_what_its_tokens_take(splits: list[int]) -> None:
    rows, experts = torch.randn(8, 16), torch.randn(2, 16, 32)
    offsets = torch.tensor(splits).cumsum(0).int()
    found = count_flops(lambda: torch._grouped_mm(rows.bfloat16(), experts.bfloat16(), offs=offsets))
    assert found == 2 * 8 * 16 * 32


class Changing(nn.Module):
    """Draws from every source of randomness, counts in a buffer, replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + x.mean(0)
        random.random()
        np.random.rand()
        return self.norm(self.linear(x)) + torch.rand(4)


def test_a_count_leaves_no_trace() -> None:
    model = Changing()
    model.norm.eval()
    model.train()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffer = model.mean
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    with untouched(model, CPU):
        assert not model.training
        assert not model(torch.ones(3, 4)).requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.mean is buffer
    assert (model.training, model.linear.training, model.norm.training) == (True, True, False)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.is_grad_enabled()


def test_no_trace_after_an_error_either() -> None:
    model = Changing()
    with pytest.raises(ZeroDivisionError), untouched(model, CPU):
        model(torch.ones(3, 4))
        raise ZeroDivisionError
    assert model.training
    assert float(model.calls) == 0


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", False, 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA H100 80GB HBM3", "fp16", False, 989.5),
        ("NVIDIA H100 PCIe", "bf16", False, 756.5),
        ("NVIDIA H100 NVL", "bf16", False, 835.5),
        ("NVIDIA H200", "bf16", False, 989.5),
        ("NVIDIA L40S", "bf16", False, 362),
        ("NVIDIA L4", "bf16", False, 121),
        ("NVIDIA A10", "bf16", False, 125),
        ("NVIDIA A40", "bf16", False, 149.7),
        ("Tesla V100-SXM2-16GB", "fp16", False, 125),
        ("Tesla V100-SXM2-16GB", "fp32", True, 15.7),
        ("Tesla T4", "fp16", False, 65),
        ("NVIDIA GeForce RTX 4090", "bf16", False, 165.2),
        ("AMD Instinct MI300X", "bf16", False, 1307.4),
    ],
)
def test_known_devices(device: str, precision: str, tf32: bool, tflops: float) -> None:
    found = peak_tflops(device, precision, tf32=tf32)
    assert found is not None
    assert found[0] == tflops
    assert found[1]


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "fp32"),
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA RTX A4000", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA H1000", "bf16"),
    ],
)
def test_others_have_no_figure_rather_than_a_wrong_one(device: str, precision: str) -> None:
    assert peak_tflops(device, precision, tf32=False) is None
