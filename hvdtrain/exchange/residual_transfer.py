"""What compression carries from one set of buckets to the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from hvdtrain.compression.feedback import RESIDUAL


@dataclass(frozen=True)
class Residuals:
    """State of compressors that no bucket holds.

    Attributes:
        tensors: by ``parameter/what``.
        ranks: how many a job had whose ranks hold equal ones.
    """

    tensors: Mapping[str, Tensor]
    ranks: int

    def owed(self, ranks: int) -> Residuals:
        """What this rank has yet to deliver, now a matter among so many ranks; all else is forgotten."""
        return Residuals({key: t for key, t in self.tensors.items() if is_owed(key)}, ranks)

    def less(self, keys: Collection[str]) -> Residuals:
        """What is left without these keys."""
        return Residuals({key: t for key, t in self.tensors.items() if key not in keys}, self.ranks)

    def without(self, parameters: Collection[str], ranks: int, keep: Collection[str] = ()) -> Residuals:
        """What is not of these parameters, for a job of so many ranks: what is owed keeps its sum over them.

        `keep`: keys that stay, whatever they are of.
        """
        scale = self.ranks / ranks
        rest = {k: t for k, t in self.tensors.items() if k in keep or k.rpartition("/")[0] not in parameters}
        return Residuals({key: t * scale if is_owed(key) and scale != 1.0 else t for key, t in rest.items()}, ranks)

    def owes(self, parameter: str) -> bool:
        """Whether something of its gradients is yet to be delivered."""
        return owed_key(parameter) in self.tensors

    def rescale(self, factor: float) -> None:
        """Multiply what is owed."""
        for key, tensor in self.tensors.items():
            if is_owed(key):
                tensor.mul_(factor)


def owed_key(parameter: str) -> str:
    """Return the key of what is owed to a parameter."""
    return f"{parameter}/{RESIDUAL}"


def is_owed(key: str) -> bool:
    """Whether a tensor of compressors, by its key, is what is yet to be delivered."""
    return key.endswith(f"/{RESIDUAL}")
