"""Let torch's GradScaler work with optimizers that exchange gradients."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hvdtrain.exchange.own_loop import Exchange

_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By the id of their optimizers, which GradScaler uses too."""


def support_grad_scaler(optimizer: Optimizer, exchange: Exchange) -> None:
    """Sum the gradients before a GradScaler unscales them, and multiply the residuals when its scale changes.

    GradScaler has no hooks for this. So two of its methods are wrapped once, for all instances: `update`, and that by
    which `unscale_` and `step` read the gradients.
    """
    _exchanges[id(optimizer)] = exchange
    unscale, update = torch.amp.GradScaler._unscale_grads_, torch.amp.GradScaler.update
    if hasattr(update, "_hvdtrain_wraps"):
        return

    @wraps(unscale)
    def unscale_summed(self: torch.amp.GradScaler, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        exchange, own = _exchanges.get(id(optimizer)), partial(unscale, self, optimizer, *arguments)
        return own() if exchange is None else exchange.unscale(own)

    @wraps(update)
    def update_all(self: torch.amp.GradScaler, new_scale: float | Tensor | None = None) -> None:
        found = [exchange for number in self._per_optimizer_states if (exchange := _exchanges.get(number))]
        found = [exchange for exchange in found if exchange.reducer.keeps_error]
        before = self.get_scale() if found else 1.0  # waits for the device
        update(self, new_scale)
        if found and (after := self.get_scale()) != before:
            for exchange in found:
                exchange.reducer.rescale(after / before)

    update_all._hvdtrain_wraps = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = unscale_summed  # type: ignore[assignment, method-assign]
    torch.amp.GradScaler.update = update_all  # type: ignore[method-assign]
