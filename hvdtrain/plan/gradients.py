"""The gradients of a model, as plans and predictions know them. Pure; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.compression.sizes import ITEM_BYTES


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        ready_s: when it is ready, from the start of the last backward pass; None if backward skips it, or if no run
            has measured it.
        state_bytes: of the optimizer's state, for each element, and besides; None if unknown.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    ready_s: float | None = None
    pack_s: float = 0.0  # time to pack it into its bucket
    rows: int | None = None  # rows that are not zero on one rank; None if nobody counted them
    state_bytes: tuple[float, float] | None = None
    summed_by: float = 1.0  # share of all ranks that sum it. The others have other parts of a divided model.
    whole: bool = False  # whether one rank must update all of it

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def part(self, ranks: int) -> Gradient:
        """Return the rows of the first of `ranks` that divide it, as FSDP does."""
        rows = -(-self.shape[0] // ranks) if self.shape else 1
        return replace(self, shape=(rows, *self.shape[1:]))

    @property
    def unit(self) -> str:
        """The block that its parameter is in, or the module if it is outside of blocks.

        A block is a member of a list of modules (`engine.blocks`), so its name ends with the first number.
        """
        parts = self.name.split(".")
        numbers = [index for index, part in enumerate(parts[:-1]) if part.isdecimal()]
        return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1])

    @property
    def block(self) -> str:
        """The block that its parameter is in; empty outside of blocks."""
        return self.unit if self.unit.rpartition(".")[2].isdecimal() else ""


def finished(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return gradients of the model's order in that in which backward finishes them; those that it skips come last."""
    found = [*reversed(gradients)]
    found.sort(key=lambda gradient: (gradient.ready_s is None, gradient.ready_s or 0.0))
    return found


def spread_evenly(gradients: Sequence[Gradient], backward_s: float) -> list[Gradient]:
    """Let backward finish the gradients in this order, each after a time in proportion to its size."""
    whole, size, spread = sum(gradient.nbytes for gradient in gradients), 0, []
    for gradient in gradients:
        size += gradient.nbytes
        spread.append(replace(gradient, ready_s=backward_s * size / max(whole, 1)))
    return spread
