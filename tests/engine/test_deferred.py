"""Deferred gradients of weights: the same as without, each in its time, and hooks run once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from hvdtrain.engine.deferred import DeferredGradients
from hvdtrain.errors import TaskError

MIXED = "its matrix is also used without a product"
OFFS = torch.tensor([3, 3, 12], dtype=torch.int32)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.once(x)).relu_()).relu_()


class Weights(nn.Module):
    """A `weight`, perhaps a second parameter or module, and what is done with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], *shape: int, **more: Any) -> None:
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.randn(*(shape or (8, 8)))), compute
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def _experts(m: Any, x: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype  # it does not cast
    return F.grouped_mm(x.reshape(-1, 8).to(dtype), m.weight.to(dtype).transpose(1, 2), offs=OFFS)


def _masked(m: Any, x: Tensor) -> Tensor:
    """The product with the mask is used twice."""
    masked = m.weight * (torch.arange(8) > 2)
    return F.linear(x, masked) + masked.sum(0)


def _vector() -> nn.Parameter:
    return nn.Parameter(torch.randn(4))


MODULES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "linear": (Linear, {"twice.bias"}),
    "grouped experts": (lambda: Weights(_experts, 3, 8, 8), set()),
    "experts, one after the other": (
        lambda: Weights(lambda m, x: torch.cat([F.linear(x[n], m.weight[n]) for n in range(3)]), 3, 8, 8),
        set(),
    ),
    "transformers' Conv1D": (
        lambda: Weights(lambda m, x: torch.addmm(m.bias, x.reshape(-1, 8), m.weight), 8, 4, bias=_vector()),
        {"bias"},
    ),
    "a matrix, and a module with one": (
        lambda: Weights(lambda m, x: F.linear(m.inner(x).relu_(), m.weight), inner=nn.Linear(8, 8)),
        {"inner.bias"},
    ),
    "what is added is no bias": (
        lambda: Weights(lambda m, x: torch.addmm(x.reshape(-1, 8), x.reshape(-1, 8), m.weight)),
        {"weight"},
    ),
    "masked": (lambda: Weights(_masked), {"weight"}),
    MIXED: (lambda: Weights(lambda m, x: F.linear(x, m.weight) + m.weight.sum(0)), {"weight"}),
    "vector": (
        lambda: Weights(
            lambda m, x: F.linear(x, m.weight) + F.linear(x[0, 0], m.matrix).sum(),
            8,
            matrix=nn.Parameter(torch.randn(2, 8)),
        ),
        {"weight", "matrix"},
    ),
    # The stage before waits for the gradient of an input on which the matrix depends.
    "from the input": (
        lambda: Weights(lambda m, x: F.linear(x, x[0, :4] * m.weight[:4] + x[1, :4]) + F.linear(x, x[0, :4])),
        {"weight"},
    ),
}
"""Each with the parameters that have a gradient, or a part of it, after the backward pass."""


def _run(module: nn.Module, x: Tensor, *, again: bool) -> Any:
    return checkpoint(module, x, use_reentrant=False) if again else module(x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_the_same(kind: str, again: bool, autocast: bool) -> None:
    """Of two micro-batches, whose deferred gradients are computed the other way round, also if modules run `again`."""
    make, complete = MODULES[kind]
    torch.manual_seed(0)
    model = make()
    other, hooks = copy.deepcopy(model), list[str]()
    deferred = DeferredGradients([model])
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooks.append(name))  # type: ignore[misc]
    inputs = [torch.randn(3, 4, 8, requires_grad=True) for _ in range(2)]
    copies = [each.detach().clone().requires_grad_() for each in inputs]
    outputs = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = [_run(other, each, again=again) for each in copies]
        for number, each in enumerate(inputs):
            deferred.use(number)
            outputs.append(_run(model, each, again=again))
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(output, wanted)
        gradient = torch.randn(output.shape).to(output.dtype)
        wanted.backward(gradient)
        deferred.use(number, backward=True)
        output.backward(gradient)
    tolerance = {"rtol": 0.02, "atol": 0.02} if autocast else {}
    for mine, its in zip(inputs, copies, strict=True):
        torch.testing.assert_close(mine.grad, its.grad, **tolerance)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name in complete)
        assert deferred.awaits(parameter) == (name not in complete or kind == MIXED)
    for number in (1, 0):
        deferred.use(number)
        hooks.clear()
        deferred.compute()
        assert sorted(hooks) == sorted(p for p, _ in model.named_parameters() if p not in complete or kind == MIXED)
    for (name, parameter), its in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, its.grad, msg=name, **tolerance)
        assert not deferred.awaits(parameter)


def test_nothing_is_deferred_outside_of_a_step_and_without_a_gradient_of_the_input() -> None:
    model = Linear()
    deferred = DeferredGradients([model])
    model(torch.randn(2, 8)).sum().backward()
    assert model.once.weight.grad is not None and model.twice.weight.grad is not None
    model.zero_grad()
    deferred.use("a micro-batch", backward=True)
    model(torch.randn(2, 8)).sum().backward()  # nobody waits for the gradient of this input
    assert model.once.weight.grad is not None and model.twice.weight.grad is None
    deferred.compute()
    assert model.twice.weight.grad is not None
    model.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    deferred.use(None)  # the step is not completed
    deferred.use("a micro-batch")
    deferred.compute()
    assert model.twice.weight.grad is None


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_within_a_loss_function_are_refused(create_graph: bool) -> None:
    """As of a penalty on them: they would be counted among those of the loss."""
    model, x = Linear(), torch.randn(2, 8, requires_grad=True)
    deferred = DeferredGradients([model])
    deferred.use(0, backward=create_graph)
    with pytest.raises(TaskError, match="computes gradients in its loss function"):
        torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)


def test_checkpointing_that_would_run_without_it_is_left_alone_or_fails() -> None:
    block, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), block.weight)[0]
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    deferred = DeferredGradients([block])
    deferred.use(0, backward=True)
    block(x).sum().backward()
    assert torch.equal(block.weight.grad, expected)
    # It runs a part of its forward pass again, outside of what replaces it.
    inner = Weights(lambda m, x: checkpoint(lambda x: F.linear(x, m.weight), x, use_reentrant=False))
    deferred = DeferredGradients([inner])
    deferred.use(0, backward=True)
    with pytest.raises(CheckpointError):
        inner(x).sum().backward()
