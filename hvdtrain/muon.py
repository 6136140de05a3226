"""Muon for matrices, with AdamW for all other parameters, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Updates of matrices are scaled as in Liu
et al., "Muon is Scalable for LLM Training" (Moonlight), 2025: then one learning rate and one weight decay suit both
parts. torch.optim.Muon is not used: it refuses the experts of transformers, which are parameters of three dimensions,
and all that are not matrices. It also computes in bf16 on CPUs, one matrix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_SMALLEST_NORM = 1e-7
_UPDATE_RMS = 0.2
"""Root mean square of a typical update of AdamW, relative to the learning rate."""
_BATCH_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Elements of the matrices that are multiplied at once: on CPUs what fits into a core's cache."""


class Muon(Optimizer):
    """Muon for the groups with `matrices`, AdamW (Loshchilov and Hutter, 2019) for the others.

    A matrix changes by the orthogonal factor of its Nesterov momentum. Parameters (experts, rows, columns) are matrices
    one by one. Matrices of equal shape are orthogonalized in batches.

    Errors: ValueError: a group with `matrices` has a parameter that is not one.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],  # those with "matrices": True have parameters of two or three dimensions
        lr: float = 8e-3,
        weight_decay: float = 0.1,  # decoupled, as in AdamW
        momentum: float = 0.9,  # of matrices
        betas: tuple[float, float] = (0.9, 0.95),  # decay rates of AdamW's moments
        eps: float = 1e-8,  # added to AdamW's denominator
        *,
        fused: bool = False,  # use the fused kernel of AdamW
    ) -> None:
        options = {"momentum": momentum, "betas": betas, "eps": eps, "fused": fused, "matrices": False}
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, **options})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Errors: ValueError: it has `matrices`, and a parameter that is not one."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        others = [p for p in group["params"] if group["matrices"] and (p.dim() not in (2, 3) or p.is_complex())]
        if others:
            found = f"a parameter of shape {tuple(others[0].shape)} and {others[0].dtype}"
            raise ValueError(f"Muon takes real matrices, or stacks of them, and found {found}")

    def needs_whole(self) -> set[nn.Parameter]:
        """Return the parameters that one rank must own whole. Rows of others (dimension 0) may be divided."""
        return {p for group in self.param_groups if group["matrices"] for p in group["params"] if p.dim() == 2}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise RuntimeError("Muon does not support sparse gradients")
            (self._update_matrices if group["matrices"] else self._update_others)(group, parameters)
        return loss

    def _update_matrices(self, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> None:
        by_shape: dict[Any, list[tuple[Tensor, ...]]] = {}
        for p in parameters:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            tensors: tuple[Any, ...] = (p.detach(), p.grad, state["momentum_buffer"])
            own = zip(*(t.unbind() for t in tensors), strict=True) if p.dim() == 3 else [tensors]
            by_shape.setdefault((p.shape[-2:], p.dtype, p.device), []).extend(own)
        for (shape, _, device), matrices in by_shape.items():
            at_once = max(1, _BATCH_ELEMENTS.get(device.type, 1) // max(1, shape.numel()))
            for first in range(0, len(matrices), at_once):
                values, gradients, buffers = map(list, zip(*matrices[first : first + at_once], strict=True))
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                updates = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
                updates = orthogonalize(updates, iteration_dtype(device)).to(updates.dtype)
                torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
                scale = _UPDATE_RMS * math.sqrt(max(shape))
                torch._foreach_add_(values, list(updates.unbind()), alpha=-group["lr"] * scale)

    def _update_others(self, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else None)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        exp_avgs, exp_avg_sqs, steps = (
            [self.state[p][slot] for p in parameters] for slot in ("exp_avg", "exp_avg_sq", "step")
        )
        adamw(
            list[Tensor](parameters),
            [p.grad for p in parameters if p.grad is not None],
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=group["fused"] or None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def iteration_dtype(device: torch.device) -> torch.dtype:
    """Return the number format of the iteration: bf16 where it is faster, and its errors do not matter."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return about the orthogonal factor of each matrix, (B, M, N): singular values of 0.7 to 1.2 instead of 1.

    By a Newton-Schulz iteration of degree 5, with the coefficients of Jordan et al., 2024, in `dtype`.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_SMALLEST_NORM)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
