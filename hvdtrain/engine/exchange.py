"""The engine of several ranks: it sums gradients while backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.compression.table import Compression, parse
from hvdtrain.exchange.buckets import Layout
from hvdtrain.exchange.reducer import Reducer


class ExchangeEngine:
    """Sums gradients in buckets over ranks while backward runs.

    Args:
        optimizer: of the model.
        reducer: sums the gradients.
        compression: of the reducer.
        undecided: whether `set_compression` chooses one later.
        resolve: returns the compression of a name, as this job uses it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: Reducer,
        compression: str = "none",
        *,
        undecided: bool = False,
        resolve: Callable[[str], Compression] = parse,
    ) -> None:
        self.optimizer = optimizer
        self.compression = compression
        self.undecided = undecided
        self._reducer = reducer
        self.resolve = resolve
        self._remaining = 0

    def set_compression(self, compression: str) -> None:
        """Use this compression from the next step on; call it alike on all ranks."""
        self.undecided = False
        if compression != self.compression:
            self.compression = compression
            self._reducer.switch(self.resolve(compression))

    def layouts(self) -> list[Layout]:
        """Return the layouts of the buckets; none before the first step."""
        return self._reducer.layouts()

    def start_times_ns(self) -> list[int]:
        """Return when the exchange of each bucket of `layouts` last started."""
        return self._reducer.start_times_ns()

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; each rank has its own number of backward passes."""
        self.optimizer.zero_grad()
        self._reducer.begin()
        self._remaining = micro_batches

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; in the last pass, exchange each bucket as soon as it is full."""
        self._remaining -= 1
        if self._remaining == 0:
            self._reducer.collect()
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Wait for the sums. Collective: yes."""
        return self._reducer.finish()

    def step(self) -> None:
        """Run the optimizer."""
        self.optimizer.step()

    def commit(self, *, applied: bool) -> None:
        """Keep or discard the new residuals."""
        self._reducer.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        self._reducer.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the state equal on all ranks. Collective: yes."""
        self._reducer.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the state's tensors as if they were synchronized. Collective: yes."""
        return self._reducer.synchronized_state()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the plan of the buckets, and the compressors' state."""
        tensors, values = self._reducer.state_dict()
        return tensors, {**values, "compression": None if self.undecided else self.compression}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load them, and the chosen compression."""
        if self.undecided and values.get("compression"):
            self.set_compression(values["compression"])
        self._reducer.load_state_dict(tensors, values)

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters by bucket."""
        return self._reducer.parameter_names()

    def buffers(self) -> list[Tensor]:
        """Return the buckets."""
        return self._reducer.buffers()

    def close(self) -> None:
        """Remove the hooks."""
        self._reducer.close()
