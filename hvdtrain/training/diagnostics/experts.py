"""Measure, in single steps, how evenly a mixture of experts distributes its work."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

_NAME = re.compile(r"router|gate", re.IGNORECASE)
_KIND = re.compile(r"router|gat(e|ing)$", re.IGNORECASE)


class Routers:
    """Counts the choices of routers, by hooks that exist only in measured steps.

    A router is a module named router or gate. It returns the indices of the chosen experts (a tensor of integers) and
    a number for each expert, as routers of transformers do. `modules` may be routers.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._hooks: list[Any] = []
        self._counts: dict[int, Tensor] = {}
        self._shares: Tensor | None = None

    def begin(self) -> None:
        """Measure the next step."""
        self._counts.clear()
        self._hooks = [module.register_forward_hook(self._on_forward) for module in self._modules]

    def end(self) -> None:
        """End the measurement; start copying the counts to the host, without waiting."""
        self.close()
        if not self._counts:
            return
        with torch.no_grad():
            # Of the busiest expert; NaN if some indices were not experts.
            counted = self._counts.values()
            shares = torch.stack([torch.where(n[-1] == 0, n[:-1].max() / n.sum(), math.nan) for n in counted])
            self._shares = torch.empty_like(shares, device="cpu", pin_memory=shares.is_cuda)
            self._shares.copy_(shares, non_blocking=True)
        self._counts.clear()

    def close(self) -> None:
        """Remove the hooks, also after an error."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def pop_share(self) -> float:
        """Return the share of the busiest expert in the most uneven router; NaN if unknown.

        Call it some steps after the measured one.
        """
        shares, self._shares = self._shares, None
        known = [] if shares is None else [share for share in shares.tolist() if not math.isnan(share)]
        return max(known, default=math.nan)

    def _on_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        found = chosen_experts(output)
        if found is None or not module.training:
            return
        chosen, experts = found
        counts = count_tokens(chosen.flatten(), experts)
        # A recomputation in backward must run no other operations than the forward pass.
        total = self._counts.setdefault(id(module), torch.zeros_like(counts))
        if len(total) != len(counts):  # differs between calls: not a router
            total[-1] = math.nan
        else:
            total += counts


@torch.no_grad()
def count_tokens(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen, and last, how many indices are no expert: (..., `experts` + 1), float64.

    It counts along the last dimension of `chosen`. `bincount` would make the host wait for the device.
    """
    where = chosen.long()
    where = where.where((where >= 0) & (where < experts), experts)  # out of bounds would end training
    counts = torch.zeros(*where.shape[:-1], experts + 1, dtype=torch.float64, device=where.device)
    return counts.scatter_add_(-1, where, torch.ones_like(where, dtype=counts.dtype))


def chosen_experts(output: Any) -> tuple[Tensor, int] | None:
    """Return the indices of the chosen experts in what a router returns, and the number of experts; None without."""
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, (tuple, list)) else []
    chosen = next((part for part in parts if part.dtype in (torch.int32, torch.int64)), None)
    experts = max([0, *(part.shape[-1] for part in parts if part.is_floating_point() and part.dim() > 1)])
    return (chosen, experts) if chosen is not None and experts > 1 else None


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that may be routers, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if _NAME.fullmatch(name.rpartition(".")[2]) or _KIND.search(type(module).__name__)
    }


def make_routers(model: nn.Module) -> Routers | None:
    """Return the counts of a model's routers; None if it has none, or is compiled: a hook would compile it again."""
    found = find_routers(model)
    compiled = (
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )
    return Routers([*found.values()]) if found and not any(compiled) else None
