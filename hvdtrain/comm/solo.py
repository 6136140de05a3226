"""One process alone: every collective is complete at once. Needs no Horovod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True)
class Finished:
    """The handle of a completed collective."""

    result: Tensor

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> Tensor:
        """Return the result."""
        return self.result


class SoloComm:
    """A job of one rank."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def __init__(self) -> None:
        self.in_flight: dict[str, float] = {}

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:
        """Return `tensor`: the sum over one rank."""
        return Finished(tensor)

    def allgather(self, tensor: Tensor, *, name: str) -> Finished:
        """Return a copy of `tensor`."""
        return Finished(tensor.clone())

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> Finished:
        """Return a copy of `tensor`: all rows stay on this rank."""
        return Finished(tensor.clone())

    def reducescatter(self, tensor: Tensor, *, name: str) -> Finished:
        """Return a copy of `tensor`: the only share."""
        return Finished(tensor.clone())

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> Finished:
        """Return `tensor`."""
        return Finished(tensor)

    def barrier(self) -> None:
        """Return at once."""

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> SoloComm:
        """Return this communicator."""
        return self

    def close(self) -> None:
        """Do nothing."""
