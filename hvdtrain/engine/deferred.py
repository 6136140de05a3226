"""Gradients of weights, deferred until after those of inputs: stages of a pipeline compute them instead of waiting.

The backward pass of a linear layer has two products: the gradient of its input, for which the stage before waits, and
that of its weight, which only the optimizer needs. Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.

torch.distributed.pipelining separates them, too, but in private functions, for stages of its own (see `engine.stage`),
and without the hooks in which our exchanges begin.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hvdtrain.errors import TaskError

_grouped_mm: Any = getattr(torch, "_grouped_mm", None)  # in F.grouped_mm
_VIEWS_AND_CASTS = ("T", "Transpose", "Permute", "Select", "Slice", "Unbind", "View", "ToCopy")


@dataclass
class _Deferred:
    """What the backward pass of a micro-batch has deferred: a root of each product's graph, and the parameters."""

    roots: list[Tensor] = field(default_factory=list)
    parameters: set[Tensor] = field(default_factory=set)


class DeferredGradients(TorchFunctionMode):
    """Defers gradients of weights that `linear`, `addmm` and `grouped_mm` multiply, until `compute`.

    They are those of nn.Linear, and in transformers also of Conv1D and of experts in their default implementation.
    Other parameters get their gradients in the backward pass.

    Args:
        modules: those with a matrix, and all within them, run in this context from now on. No other may replace their
            `forward`, because activation checkpointing would then run them without it.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._passes: dict[Hashable, _Deferred] = {}
        self._pass: Hashable = None
        self._in_backward = False
        for module in (each for outer in modules for each in outer.modules()):
            has_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
            if has_matrix and not isinstance(module, nn.Embedding) and "forward" not in vars(module):
                module.forward = partial(self._run, module.forward)

    def use(self, key: Hashable, *, backward: bool = False) -> None:
        """Begin a pass of the micro-batch `key`; None outside of a step, where nothing is deferred."""
        self._pass, self._in_backward = key, backward
        if key is None:
            self._passes.clear()  # of a step that was not completed

    def compute(self) -> None:
        """Compute the deferred gradients of the micro-batch in use."""
        deferred = self._passes.pop(self._pass, _Deferred())
        if deferred.roots:
            torch.autograd.backward(deferred.roots, [torch.empty_like(root) for root in deferred.roots])

    def awaits(self, parameter: Tensor) -> bool:
        """Return whether a gradient of a parameter is deferred."""
        return any(parameter in each.parameters for each in self._passes.values())

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
        """Call a function of torch, or its replacement."""
        keywords = keywords or {}
        if not torch.is_grad_enabled():  # as within a product below, if modules are nested
            return function(*arguments, **keywords)
        if function is F.linear:
            return self._linear(*arguments, **keywords)
        if function is torch.addmm and len(arguments) == 3 and not keywords and arguments[0].dim() == 1:
            bias, input, weight = arguments
            return self._linear(input, weight.t(), bias)
        if function is _grouped_mm and [name for name, value in keywords.items() if value is not None] == ["offs"]:
            return self._apply(_Grouped, function, *arguments, offs=keywords["offs"])
        return function(*arguments, **keywords)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.dim() < 2 or weight.dim() != 2:
            return F.linear(input, weight, bias)
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
            # Autocast does not reach the backward pass of an autograd.Function.
            dtype = torch.get_autocast_dtype(device)
            input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        rows = self._apply(_Linear, F.linear, input.flatten(0, -2), weight, bias=bias)
        return rows.view(*input.shape[:-1], rows.shape[-1])

    def _apply(self, kind: Any, function: Any, input: Tensor, weight: Tensor, **keywords: Any) -> Tensor:
        parameter = _parameter_of(weight)
        if parameter is None or not input.requires_grad:
            return function(input, weight, **keywords)  # type: ignore[no-any-return]
        products: list[Callable[[], Tensor]] = []
        deferred = self._passes.setdefault(self._pass, _Deferred())
        root: Any = _Product.apply(weight, products)  # type: ignore[no-untyped-call]
        deferred.roots.append(root)
        deferred.parameters.add(parameter)
        return kind.apply(input, weight.detach(), *keywords.values(), partial(self._defer, products))  # type: ignore[no-any-return]

    def _defer(self, products: list[Callable[[], Tensor]], product: Callable[[], Tensor]) -> None:
        """Note a product. Errors: TaskError: its gradient is not that of the loss."""
        if not self._in_backward or torch.is_grad_enabled():
            raise TaskError(
                "--parallel.zero_bubble does not support a task that computes gradients in its loss function",
                expected="gradients that only the trainer computes, once",
                next_step="leave out --parallel.zero_bubble",
            )
        products.append(product)


def _parameter_of(weight: Tensor) -> Tensor | None:
    """Return the parameter that a tensor is, or is a view or cast of, if it has a gradient; else None."""
    if (node := weight.grad_fn) is None:
        return weight if weight.requires_grad and isinstance(weight, nn.Parameter) else None
    while not hasattr(node, "variable"):
        following = [each for each, _ in node.next_functions if each is not None]
        if node.name().partition("Backward")[0] not in _VIEWS_AND_CASTS or len(following) != 1:
            return None
        node = following[0]
    return node.variable if isinstance(node.variable, nn.Parameter) else None


class _Product(torch.autograd.Function):
    """Returns a tensor without elements. Its backward pass returns the deferred gradient of a weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, products: list[Callable[[], Tensor]]) -> Tensor:
        ctx.products = products
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.products.pop()() if ctx.products else None, None


class _Linear(torch.autograd.Function):
    """Product of rows with a weight, and a bias or none.

    Saves a tensor more than torch: checkpointing that runs a part again without `DeferredGradients` then fails.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, defer: Callable[..., None]) -> Tensor:
        ctx.defer = defer
        ctx.save_for_backward(input, weight, input.new_empty(0))
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        ctx.defer(lambda: gradient.t() @ input)
        return gradient @ weight, None, gradient.sum(0) if ctx.needs_input_grad[2] else None, None


class _Grouped(torch.autograd.Function):
    """Products of rows with the weights of their experts; `offs`: where the rows of each expert end. See `_Linear`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, offs: Tensor, defer: Callable[..., None]) -> Tensor:
        ctx.defer = defer
        ctx.save_for_backward(input, weight, offs, input.new_empty(0))
        result: Tensor = _grouped_mm(input, weight, offs=offs)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, offs, _ = ctx.saved_tensors
        # Most weights are the transpose of a parameter, as this product is.
        ctx.defer(lambda: _grouped_mm(gradient.t(), input, offs=offs).transpose(-2, -1))
        return _grouped_mm(gradient, weight.transpose(-2, -1), offs=offs), None, None, None
