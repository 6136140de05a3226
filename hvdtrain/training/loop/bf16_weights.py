"""bf16 copies of the weights for forward and backward; the model's parameters stay fp32, as the optimizer has them.

`torch.func.functional_call` is not used: it puts the parameters back when the call returns, so that a block that
backward computes again would have other weights. Micikevicius et al., "Mixed Precision Training", 2018, for copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from hvdtrain.engine.blocks import blocks


class _Copy(torch.autograd.Function):
    """Return a bf16 copy of a parameter; its gradient becomes one of the parameter, in its format.

    Unlike that of `Tensor.to`, backward supports sparse gradients.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return parameter.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].to(ctx.dtype)


class Bf16Weights:
    """Gives the modules of a model bf16 weights for some time, as often as it is called.

    Inputs of the model and of its blocks are cast to bf16 then, and its outputs to fp32, as FSDP2 does. Buffers stay as
    they are. So do weights of batch norm and instance norm, which torch needs in the format of their statistics.

    Args:
        model: gets hooks, which do nothing at other times.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._is_active = model, False
        for module in {model: None, **dict.fromkeys(blocks(model))}:
            module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        model.register_forward_hook(self._cast_outputs)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Have the modules hold differentiable copies: one for each parameter, also if several modules use it.

        It spans forward and backward, of any number of passes. Gradients are summed in the parameters.
        """
        entries = [(module, name, p) for module in self._model.modules() for name, p in _weights(module).items()]
        copies: dict[Tensor, Tensor] = {p: _Copy.apply(p) for p in dict.fromkeys(p for _, _, p in entries)}  # type: ignore[no-untyped-call]
        try:
            for module, name, parameter in entries:
                _set(module, name, copies[parameter])
            self._is_active = True
            yield
        finally:
            self._is_active = False
            for module, name, parameter in entries:
                _set(module, name, parameter)

    def _cast_inputs(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        return _cast((arguments, keywords), torch.bfloat16) if self._is_active else None

    def _cast_outputs(self, module: nn.Module, arguments: Any, outputs: Any) -> Any:
        return _cast(outputs, torch.float32) if self._is_active else None


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    if isinstance(module, _NormBase):
        return {}
    return {name: p for name, p in module._parameters.items() if p is not None and p.dtype == torch.float32}


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """Set the entry of a parameter: not as an attribute, because a copy is none."""
    module._parameters[name] = value  # type: ignore[assignment]
    names = getattr(module, "_flat_weights_names", ())  # recurrent modules have a list of them, too
    if isinstance(module, nn.RNNBase) and name in names:
        module._flat_weights[names.index(name)] = value


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, values)
