"""Gradients of weights, computed after those of inputs: stages of a pipeline compute them instead of waiting.

The backward pass of a linear layer has two products: the gradient of its input, for which the stage before waits, and
that of its weight, which only the optimizer needs. Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.

torch.distributed.pipelining separates them, too, but in private functions, for stages of its own (see `engine.stage`),
and without the hooks in which our exchanges begin.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_grouped_mm: Any = getattr(torch, "_grouped_mm", None)  # in F.grouped_mm


class DeferredGradients(TorchFunctionMode):
    """Leaves the gradients of weights out of backward passes, and computes them when it is called.

    Of the parameters that `linear`, `addmm` and `grouped_mm` multiply: those of nn.Linear, and in transformers also
    Conv1D and experts. Others get their gradients in the backward pass.

    Args:
        model: modules with matrices run in this context from now on.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # By pass and weight, the products that have its gradient as their sum.
        self._products: dict[Hashable, dict[Tensor, list[Callable[[], Tensor]]]] = {}
        self._pass: Hashable = None
        for module in model.modules():
            has_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
            if has_matrix and not isinstance(module, nn.Embedding):
                module.forward = partial(self._run, module.forward)

    def use(self, key: Hashable) -> None:
        """Let `key` name the pass that runs from now on; None outside of a step, where nothing is left out."""
        self._pass = key
        if key is None:
            self._products.clear()  # of a step that was not completed

    def compute(self) -> None:
        """Add the gradients that the backward pass of the one in use has left out."""
        for weight, products in self._products.pop(self._pass, {}).items():
            total: Tensor | None = None
            while products:
                product = products.pop()()
                total = product if total is None else total.add_(product)
            if total is not None:
                torch.autograd.backward(weight, total)

    def _run(self, forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self._pass is None or not torch.is_grad_enabled():
            return forward(*arguments, **keywords)
        with self:
            return forward(*arguments, **keywords)

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or what takes its place."""
        keywords = keywords or {}
        if function is F.linear:
            return self._linear(*arguments, **keywords)
        if function is torch.addmm and len(arguments) == 3 and not keywords:
            bias, input, weight = arguments
            return self._linear(input, weight.t(), bias)
        if function is _grouped_mm and [name for name, value in keywords.items() if value is not None] == ["offs"]:
            return self._apply(_Grouped, function, *arguments, offs=keywords["offs"])
        return function(*arguments, **keywords)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
            # Autocast does not reach the backward pass of an autograd.Function.
            dtype = torch.get_autocast_dtype(device)
            input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return self._apply(_Linear, F.linear, input, weight, bias=bias)

    def _apply(self, kind: Any, function: Any, input: Tensor, weight: Tensor, **keywords: Any) -> Tensor:
        if not (torch.is_grad_enabled() and input.requires_grad and input.dim() > 1 and _comes_from_parameter(weight)):
            return function(input, weight, **keywords)  # type: ignore[no-any-return]
        products = self._products.setdefault(self._pass, {}).setdefault(weight, [])
        return kind.apply(input, weight.detach(), *keywords.values(), products)  # type: ignore[no-any-return]


def _comes_from_parameter(weight: Tensor) -> bool:
    """Return whether a tensor needs gradients only for one parameter: it is one, its transpose, or a cast of it."""
    if (node := weight.grad_fn) is None:
        return weight.requires_grad and isinstance(weight, nn.Parameter)
    while not hasattr(node, "variable"):
        following = [each for each, _ in node.next_functions if each is not None]
        if len(following) != 1:
            return False
        node = following[0]
    return isinstance(node.variable, nn.Parameter)


class _Linear(torch.autograd.Function):
    """Product with a weight, and a bias or none."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, products: list[Callable[[], Tensor]]
    ) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        ctx.products.append(lambda: rows.t() @ input.flatten(0, -2))
        return gradient @ weight, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Grouped(torch.autograd.Function):
    """Products of rows with the weights of their experts; `offs`: where the rows of each expert end."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, offs: Tensor, products: list[Callable[[], Tensor]]) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(input, weight, offs)
        result: Tensor = _grouped_mm(input, weight, offs=offs)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, offs = ctx.saved_tensors
        # Most weights are the transpose of a parameter, as this product is.
        ctx.products.append(lambda: _grouped_mm(gradient.t(), input, offs=offs).transpose(-2, -1))
        return _grouped_mm(gradient, weight.transpose(-2, -1), offs=offs), None, None, None
