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
        self._counts: dict[int, list[Tensor]] = {}  # of each module, of its calls
        self._counters: dict[int, TokenCounter] = {}  # by the number of experts
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
            shares = torch.stack([_share_of_busiest(counts) for counts in self._counts.values()])
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
        if experts not in self._counters:
            self._counters[experts] = TokenCounter(experts, chosen.device)
        counter = self._counters[experts]
        self._counts.setdefault(id(module), []).append(counter.add(counter.zeros(), chosen.flatten()))


def _share_of_busiest(counts: list[Tensor]) -> Tensor:
    """Return its share; NaN if some indices were not experts, or if calls have other numbers of them: no router."""
    if len({len(each) for each in counts}) > 1:
        return torch.full_like(counts[0][0], math.nan)
    sums = torch.stack(counts).sum(0)
    return torch.where(sums[0] + sums[-1] == 0, sums.max() / sums.sum(), math.nan)


class TokenCounter:
    """Counts how often each expert was chosen: (..., experts + 2), float64.

    First come the negative indices, then the experts, last the larger indices, which otherwise would end training.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        self._bounds = torch.arange(experts + 1, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)

    def zeros(self, *shape: int) -> Tensor:
        """Return counts of nothing."""
        return self._one.new_zeros(*shape, len(self._bounds) + 1)

    @torch.no_grad()
    def add(self, counts: Tensor, chosen: Tensor) -> Tensor:
        """Add the indices along the last dimension of `chosen` to `counts`; return these.

        `bincount` would make the host wait for the device.
        """
        places = torch.bucketize(chosen.long(), self._bounds, right=True)
        return counts.scatter_add_(-1, places, self._one.expand(places.shape))


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
