"""Gradients of weights that are computed after those of inputs: the same, and each when it is due."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.engine.deferred import DeferredGradients

OFFS = torch.tensor([3, 3, 12], dtype=torch.int32)


class Linear(nn.Module):
    """A matrix that is multiplied twice, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.once(x)).tanh())  # type: ignore[no-any-return]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype  # it does not cast
        return F.grouped_mm(x.reshape(-1, 8).to(dtype), self.weights.to(dtype).transpose(1, 2), offs=OFFS)


class Masked(nn.Module):
    """As Conv1D of transformers, but only a part of the weight counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, 8), self.weight * (torch.arange(4) > 0))


class Mixed(nn.Module):
    """Its matrix is also used without a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) + self.weight.sum(0)


class FromInput(nn.Module):
    """Multiplies with what depends on its input, which the stage before waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, x[0, :4] * self.weight[:4] + x[1, :4]) + F.linear(x, x[0, :4])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("kind", "later"),
    [
        (Linear, {"once.weight", "twice.weight"}),
        (Experts, {"weights"}),
        (Masked, {"weight"}),
        (Mixed, set()),
        (FromInput, set()),
    ],
)
def test_gradients_are_the_same(kind: type[nn.Module], later: set[str], again: bool, autocast: bool) -> None:
    """Also with blocks that run `again` in the backward pass; two passes, and the first is computed last."""
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    deferred = DeferredGradients(model)
    inputs = [torch.randn(3, 4, 8, requires_grad=True) for _ in range(2)]
    copies = [each.detach().clone().requires_grad_() for each in inputs]

    def run(module: nn.Module, x: Tensor) -> Any:
        return checkpoint(module, x, use_reentrant=False) if again else module(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs, expected = [], [run(other, each) for each in copies]
        for number, each in enumerate(inputs):
            deferred.use(number)
            outputs.append(run(model, each))
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(output, wanted)
        gradient = torch.randn(output.shape).to(output.dtype)
        wanted.backward(gradient)
        deferred.use(number)
        output.backward(gradient)
    tolerance = {"rtol": 0.02, "atol": 0.02} if autocast else {}
    for mine, its in zip(inputs, copies, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **tolerance)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in later)
    for number in (1, 0):
        deferred.use(number)
        deferred.compute()
    for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, msg=name, **tolerance)


def test_nothing_is_left_out_outside_of_a_step_and_without_a_gradient_of_the_input() -> None:
    model = Linear()
    deferred = DeferredGradients(model)
    model(torch.randn(2, 8)).sum().backward()
    deferred.use("a step")
    first = model.once.weight.grad
    assert first is not None and model.twice.weight.grad is not None
    model.zero_grad()
    model(torch.randn(2, 8)).sum().backward()  # nobody waits for the gradient of this input
    assert model.once.weight.grad is not None and model.twice.weight.grad is None
    deferred.compute()
    assert model.twice.weight.grad is not None


def test_hooks_run_once_with_the_sum_of_all_uses() -> None:
    model = Linear()
    deferred = DeferredGradients(model)
    seen: list[Tensor] = []
    model.twice.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]
    deferred.use(0)
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    assert not seen
    deferred.compute()
    (gradient,) = seen
    assert torch.equal(gradient, model.twice.weight.grad)  # type: ignore[arg-type]
    deferred.compute()  # nothing is left
    assert len(seen) == 1
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    deferred.use(None)  # the step is not completed
    deferred.use(0)
    deferred.compute()
    assert len(seen) == 1
