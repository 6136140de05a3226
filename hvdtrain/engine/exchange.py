"""Several ranks: gradients summed while backward runs."""

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
    """Several ranks: gradients summed in buckets while backward runs.

    Args:
        optimizer: follows them.
        reducer: sums them.
        compression: by which it does.
        undecided: whether another may be chosen later.
        meant: what the name of a compression means in this job.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: Reducer,
        compression: str = "none",
        *,
        undecided: bool = False,
        meant: Callable[[str], Compression] = parse,
    ) -> None:
        self.optimizer = optimizer
        self.compression = compression
        self.undecided = undecided
        self._reducer = reducer
        self.meant = meant
        self._left = 0

    def decide(self, compression: str) -> None:
        """Exchange this way from the next step on; the same on all ranks."""
        self.undecided = False
        if compression != self.compression:
            self.compression = compression
            self._reducer.switch(self.meant(compression))

    def layouts(self) -> list[Layout]:
        """What is exchanged together; nothing before the first step."""
        return self._reducer.layouts()

    def start_times_ns(self) -> list[int]:
        """Return when the exchange of each bucket of `layouts` last started."""
        return self._reducer.start_times_ns()

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; the number of backward passes is each rank's own."""
        self.optimizer.zero_grad()
        self._reducer.begin()
        self._left = micro_batches

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`; on the last pass, exchange each bucket once it is full."""
        self._left -= 1
        if self._left == 0:
            self._reducer.collect()
        torch.autograd.backward(loss)

    def finish(self) -> list[Tensor]:
        """Wait for the sums. Collective: yes."""
        return self._reducer.finish()

    def step(self) -> None:
        """Follow the gradients."""
        self.optimizer.step()

    def commit(self, *, applied: bool) -> None:
        """Keep or forget what compression carries to the next step."""
        self._reducer.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Multiply what compression carries to the next step."""
        self._reducer.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the state the same on all ranks. Collective: yes."""
        self._reducer.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """The tensors of the state, as if it were made the same. Collective: yes."""
        return self._reducer.synchronized_state()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The plan of the buckets, and the compressors' state."""
        tensors, values = self._reducer.state_dict()
        return tensors, {**values, "compression": None if self.undecided else self.compression}

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take them over, and what was decided."""
        if self.undecided and values.get("compression"):
            self.decide(values["compression"])
        self._reducer.load_state_dict(tensors, values)

    def carried(self) -> dict[str, list[str]]:
        """Names of the parameters by bucket."""
        return self._reducer.parameter_names()

    def buffers(self) -> list[Tensor]:
        """The buckets."""
        return self._reducer.buffers()

    def close(self) -> None:
        """Take the hooks off."""
        self._reducer.close()
