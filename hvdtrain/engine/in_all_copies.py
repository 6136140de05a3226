"""The sums of ranks that all update the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hvdtrain.compression.table import Compression, parse
from hvdtrain.engine.sums import Sums, norm_in_order
from hvdtrain.exchange.in_order import Leaves
from hvdtrain.exchange.reducer import Reducer


class InAllCopies(Sums):
    """Sums gradients in buckets over ranks while the last backward pass runs; each rank has all sums.

    Args:
        reducer: sums them.
        compression: its name.
        undecided: whether `set_compression` chooses one later.
        resolve: returns the compression of a name, as this job uses it.
        leaves: add the passes in the order of their positions; None to let autograd add them.
    """

    def __init__(
        self,
        reducer: Reducer,
        compression: str = "none",
        *,
        undecided: bool = False,
        resolve: Callable[[str], Compression] = parse,
        leaves: Leaves | None = None,
    ) -> None:
        self.leaves = leaves
        self.reducer, self.compression, self.undecided, self.resolve = reducer, compression, undecided, resolve
        self.residuals = reducer

    def set_compression(self, compression: str) -> None:
        """Use this compression from the next step on; call it alike on all ranks. Clears gradients."""
        self.undecided = False
        if compression != self.compression:
            self.compression = compression
            self.reducer.switch(self.resolve(compression))

    def begin(self) -> None:  # noqa: D102
        self.reducer.begin()
        if self.leaves is not None:
            self.leaves.begin(self.positions, self.schedule.left)

    def backward(self, call: Callable[[], None]) -> None:
        """Run a backward pass; in the last one, exchange each bucket as soon as it is full."""
        if not self.schedule.left:
            self.reducer.collect()
        call()
        if self.leaves is not None and self.schedule.left:
            self.leaves.take(self.reducer.named)

    def finish(self) -> list[Tensor]:  # noqa: D102
        return self.reducer.finish()

    def unused(self) -> list[bool]:
        """Return for each parameter whether it has no gradient."""
        used: set[str] = set() if self.leaves is None else self.leaves.used
        named = self.reducer.named
        return [each and name not in used for each, (name, _) in zip(self.reducer.unused(), named, strict=True)]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the sums."""
        return super().norm(gradients) if self.leaves is None else norm_in_order(p for _, p in self.reducer.named)

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of parameters that no rank has used."""
        self.reducer.leave_out(numbers)

    def values(self) -> dict[str, Any]:  # noqa: D102
        return {"compression": None if self.undecided else self.compression}

    def before_load(self, values: Mapping[str, Any]) -> None:  # noqa: D102
        if self.undecided and values.get("compression"):
            self.set_compression(values["compression"])

    def parameters_by_collective(self) -> dict[str, list[str]]:  # noqa: D102
        return self.reducer.parameter_names()

    def buffers(self) -> list[Tensor]:
        """Return the buckets."""
        return self.reducer.buffers()

    def close(self) -> None:  # noqa: D102
        self.reducer.close()
