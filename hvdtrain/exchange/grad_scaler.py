"""Let torch's GradScaler work with optimizers that exchange gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from hvdtrain.exchange.optimizer import Exchange

_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()
"""By the id of their optimizers, which GradScaler uses too."""


def support_grad_scaler(optimizer: Optimizer, exchange: Exchange) -> None:
    """Sum the gradients before a GradScaler unscales them, and multiply the residuals when its scale changes.

    GradScaler has no hooks for this. So `unscale_`, which its `step` calls too, and `update` are wrapped once, for all
    instances.
    """
    _exchanges[id(optimizer)] = exchange
    unscale, update = torch.amp.GradScaler.unscale_, torch.amp.GradScaler.update
    if hasattr(update, "_hvdtrain_wraps"):
        return

    @functools.wraps(unscale)
    def unscale_summed(self: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        exchange = _exchanges.get(id(optimizer))
        if exchange is not None and self.is_enabled():
            exchange.sum_up()
        unscale(self, optimizer)

    @functools.wraps(update)
    def update_all(self: torch.amp.GradScaler, new_scale: float | Tensor | None = None) -> None:
        found = [exchange for number in self._per_optimizer_states if (exchange := _exchanges.get(number))]
        found = [exchange for exchange in found if exchange.reducer.keeps_error]
        before = self.get_scale() if found else 1.0  # waits for the device
        update(self, new_scale)
        if found and (after := self.get_scale()) != before:
            for exchange in found:
                exchange.reducer.rescale(after / before)

    update_all._hvdtrain_wraps = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.unscale_ = unscale_summed  # type: ignore[method-assign]
    torch.amp.GradScaler.update = update_all  # type: ignore[method-assign]
