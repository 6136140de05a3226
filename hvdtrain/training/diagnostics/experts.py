"""How evenly a mixture of experts gives its experts work, looked at in single steps."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

_NAME = re.compile(r"router|gate", re.IGNORECASE)
_KIND = re.compile(r"router|gat(e|ing)$", re.IGNORECASE)


class Routers:
    """Looks at what routers choose, by hooks that are there only in steps that are looked at.

    A router is a module called so, or gate, that gives the numbers of the experts it has chosen (a tensor of integers)
    beside a number for each expert, as those of transformers do.

    Args:
        found: modules that may be routers.
    """

    def __init__(self, found: list[nn.Module]) -> None:
        self._found = found
        self._hooks: list[Any] = []
        self._counts: dict[int, Tensor] = {}
        self._shares: Tensor | None = None

    def begin(self) -> None:
        """Look at the step that comes."""
        self._counts.clear()
        self._hooks = [module.register_forward_hook(self._saw) for module in self._found]

    def end(self) -> None:
        """Look no more; what was seen is brought from the device, for which nobody waits."""
        self.close()
        if not self._counts:
            return
        with torch.no_grad():
            shares = torch.stack([_most(counts) for counts in self._counts.values()])
            self._shares = torch.empty(shares.shape, dtype=shares.dtype, pin_memory=shares.is_cuda)
            self._shares.copy_(shares, non_blocking=True)
        self._counts.clear()

    def close(self) -> None:
        """Take the hooks off, whatever became of the step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> float:
        """Of all choices of the router that is most uneven, the share of its expert with most; NaN where unknown.

        To be asked some steps after the one that was looked at.
        """
        shares, self._shares = self._shares, None
        known = [] if shares is None else [share for share in shares.tolist() if not math.isnan(share)]
        return max(known, default=math.nan)

    def _saw(self, module: nn.Module, inputs: Any, output: Any) -> None:
        parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, (tuple, list)) else []
        chosen = next((part for part in parts if part.dtype in (torch.int32, torch.int64)), None)
        experts = max((part.shape[-1] for part in parts if part.is_floating_point() and part.dim() > 1), default=0)
        if chosen is None or not module.training or experts < 2:
            return
        with torch.no_grad():
            # What is no number of these experts is counted beside them: out of bounds, training would end by it.
            where = chosen.flatten().long()
            where = where.where((where >= 0) & (where < experts), experts)
            counts = self._counts.get(id(module))
            if counts is None:
                counts = self._counts[id(module)] = torch.zeros(experts + 1, device=where.device)
            if len(counts) != experts + 1:  # not the same thing in each call: no router
                counts[-1] = math.nan
                return
            counts.scatter_add_(0, where, torch.ones_like(where, dtype=counts.dtype))


def _most(counts: Tensor) -> Tensor:
    """The share of the expert with most; NaN where not all of them are experts, as of one that tells weights alone."""
    return torch.where(counts[-1] == 0, counts[:-1].max() / counts.sum(), math.nan)


def find_routers(model: nn.Module) -> Routers | None:
    """What looks at a model's routers; None where it has none, or is compiled: a hook would have it compiled anew."""
    modules = dict(model.named_modules())
    if any(_is_compiled(module) for module in modules.values()):
        return None
    found = [
        module
        for name, module in modules.items()
        if _NAME.fullmatch(name.rpartition(".")[2]) or _KIND.search(type(module).__name__)
    ]
    return Routers(found) if found else None


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
