"""The engine of several ranks: it sums gradients while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.compression.table import Compression, parse
from hvdtrain.engine.base import Engine
from hvdtrain.engine.schedule import Schedule
from hvdtrain.exchange.reducer import Reducer


@dataclass
class ExchangeEngine(Engine):
    """Sums gradients in buckets over ranks while backward runs.

    Attributes:
        undecided: whether `set_compression` chooses one later.
        resolve: returns the compression of a name, as this job uses it.
    """

    optimizer: Optimizer
    reducer: Reducer
    compression: str = "none"
    undecided: bool = False
    resolve: Callable[[str], Compression] = parse

    def __post_init__(self) -> None:
        """Remember what the reducer does."""
        self.residuals, self._schedule = self.reducer, Schedule()

    def set_compression(self, compression: str) -> None:
        """Use this compression from the next step on; call it alike on all ranks. Clears gradients."""
        self.undecided = False
        if compression != self.compression:
            self.compression = compression
            self.optimizer.zero_grad()
            self.reducer.switch(self.resolve(compression))

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; each rank has its own number of backward passes."""
        self.optimizer.zero_grad()
        self.reducer.begin()
        self._schedule.begin(micro_batches)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; in the last pass, exchange each bucket as soon as it is full."""
        self._schedule.count()
        if not self._schedule.left:
            self.reducer.collect()
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Wait for the sums. Collective: yes."""
        return self.reducer.finish()

    def unused(self) -> list[bool]:
        """Return for each parameter whether it has no gradient."""
        return self.reducer.unused()

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of parameters that no rank has used."""
        self.reducer.leave_out(numbers)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the plan of the buckets, and the compressors' state."""
        tensors, values = super().state_dict()
        return tensors, {**values, "compression": None if self.undecided else self.compression}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load them, and the chosen compression."""
        if self.undecided and values.get("compression"):
            self.set_compression(values["compression"])
        super().load_state_dict(tensors, values)

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters by bucket."""
        return self.reducer.parameter_names()

    def buffers(self) -> list[Tensor]:
        """Return the buckets."""
        return self.reducer.buffers()

    def close(self) -> None:
        """Remove the hooks."""
        self.reducer.close()
