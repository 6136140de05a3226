"""Attention with the memory that it has on GPUs, where no kernel keeps the scores of all pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """While it is active, `scaled_dot_product_attention` keeps its inputs, its result and a number for each query.

    That is what torch's flash, memory-efficient and cuDNN kernels keep. On a CPU, torch computes whole scores if keys
    and values have different sizes, as in DeepSeek's latent attention. Results have no values.

    torch's function is replaced, too: modes are not active where backward computes activations again.
    """

    def __enter__(self) -> FusedAttention:
        """Begin."""
        nn.functional.scaled_dot_product_attention = self._call
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(scaled_dot_product_attention, (), args, kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        named = dict(kwargs or {})
        if func is not scaled_dot_product_attention:
            return func(*args, **named)
        given = [*args, *(named[name] for name in ("query", "key", "value")[len(args) :])][:3]
        if torch.is_autocast_enabled("cpu"):
            given = [tensor.to(torch.get_autocast_dtype("cpu")) for tensor in given]
        return _Attention.apply(*given)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return a tensor (..., queries, size of a value)."""
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return a gradient for each input."""
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])
