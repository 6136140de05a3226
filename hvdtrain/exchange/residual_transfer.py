"""The state of compressors on its way from one set of buckets to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from hvdtrain.compression.feedback import RESIDUAL


@dataclass(frozen=True)
class DetachedState:
    """State of compressors that belongs to no bucket: residuals, and what the compressors have learned.

    Attributes:
        tensors: by ``parameter/kind``.
        ranks: world size of the job in which all ranks hold this state.
    """

    tensors: Mapping[str, Tensor]
    ranks: int

    def residuals_only(self, ranks: int) -> DetachedState:
        """Return this rank's residuals alone, for a job of another world size."""
        return DetachedState({key: t for key, t in self.tensors.items() if is_residual(key)}, ranks)

    def without_keys(self, keys: Collection[str]) -> DetachedState:
        """Return the state without these keys."""
        return DetachedState({key: t for key, t in self.tensors.items() if key not in keys}, self.ranks)

    def without_parameters(self, parameters: Collection[str], ranks: int, keep: Collection[str] = ()) -> DetachedState:
        """Return the state of other parameters, for `ranks`: the sum of a residual over ranks stays the same.

        Args:
            parameters: names to leave out.
            ranks: new world size.
            keep: keys to keep in any case.
        """
        scale = self.ranks / ranks
        rest = {k: t for k, t in self.tensors.items() if k in keep or k.rpartition("/")[0] not in parameters}
        scaled = {key: t * scale if is_residual(key) and scale != 1.0 else t for key, t in rest.items()}
        return DetachedState(scaled, ranks)

    def has_residual(self, parameter: str) -> bool:
        """Whether there is a residual of this parameter."""
        return residual_key(parameter) in self.tensors

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        for key, tensor in self.tensors.items():
            if is_residual(key):
                tensor.mul_(factor)


def residual_key(parameter: str) -> str:
    """Return the key of a parameter's residual."""
    return f"{parameter}/{RESIDUAL}"


def is_residual(key: str) -> bool:
    """Whether a key in the state of compressors is that of a residual."""
    return key.endswith(f"/{RESIDUAL}")
