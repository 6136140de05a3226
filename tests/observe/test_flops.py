from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from hvdtrain.observe import flops
from hvdtrain.observe.flops import FlopCount, peak_tflops


def count_flops(forward: Callable[[], object]) -> int | None:
    with torch.no_grad(), FlopCount() as count:
        forward()
    return count.flops


def _grouped_product(*splits: int) -> torch.Tensor:
    rows, experts = torch.randn(8, 16).bfloat16(), torch.randn(2, 16, 32).bfloat16()
    return torch._grouped_mm(rows, experts, offs=torch.tensor(splits).cumsum(0).int())


MODEL, Q = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(2, 3, 128, 16)
ATTENTION = 2 * (2 * 2 * 3 * 128 * 128 * 16)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
@pytest.mark.parametrize(
    ("forward", "flops"),
    [
        (lambda: MODEL(torch.ones(5, 6)), 2 * 5 * (6 * 16 + 16 * 1)),
        (lambda: nn.functional.scaled_dot_product_attention(Q, Q, Q), ATTENTION),
        (lambda: flex_attention(Q, Q, Q), ATTENTION),
        (lambda: _grouped_product(4, 4), 2 * 8 * 16 * 32),  # a mixture of experts takes what its tokens take
        (lambda: _grouped_product(1, 7), 2 * 8 * 16 * 32),
    ],
)
def test_counted_operations_equal_formulas(forward: Callable[[], object], flops: int) -> None:
    assert count_flops(forward) == flops


def test_what_is_computed_stays_the_same_to_the_bit() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    x, grads, losses = torch.randn(5, 6), [], []
    for mode in (nullcontext(), FlopCount()):
        model.zero_grad()
        torch.manual_seed(4)
        with mode:
            loss = nn.functional.cross_entropy(model(x), torch.arange(5) % 4)
        loss.backward()
        losses.append(loss.detach())
        grads.append([p.grad.clone() for p in model.parameters()])
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_compiled_parts_stay_compiled() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        seen.append(graph)
        return graph.forward

    linear = nn.Linear(6, 16)
    count_flops(lambda: torch.compile(linear, backend=backend)(torch.ones(5, 6)))
    assert seen


def test_a_formula_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(flops.FORMULAS, torch.ops.aten.relu, lambda *a, **k: 1 // 0)
    with caplog.at_level("DEBUG", logger="hvdtrain"), FlopCount() as count:
        assert float(torch.relu(torch.tensor(2.0))) == 2.0
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert count.flops is None
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("device", "precision", "tf32", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", False, 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA H100 PCIe", "bf16", False, 756.5),
        ("NVIDIA L4", "bf16", False, 121),
        ("Tesla V100-SXM2-16GB", "fp16", False, 125),
        ("Tesla V100-SXM2-16GB", "bf16", False, None),
        ("Tesla V100-SXM2-16GB", "fp32", True, 15.7),
        ("NVIDIA GeForce RTX 4090", "bf16", False, 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", False, None),
        ("NVIDIA A10G", "bf16", False, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", False, None),
        ("cpu", "fp32", False, None),
    ],
)
def test_devices_have_the_figure_of_their_data_sheet_or_none(
    device: str, precision: str, tf32: bool, tflops: float | None
) -> None:
    found = peak_tflops(device, precision, tf32=tf32)
    assert (found and found[0]) == tflops
