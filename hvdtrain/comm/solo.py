"""Communicators without other ranks: of one process alone, or of an imagined job, to count. They need no Horovod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
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


class UnderWay(Finished):
    """The handle of a collective that takes as long as it may: it completes when it is waited for."""

    def done(self) -> bool:
        """Return False."""
        return False


@dataclass
class Traffic:
    """The bytes that a rank sends in collectives of many ranks."""

    sent: int = 0  # of all. An all-reduce sends twice its bytes, an all-gather those that arrive.
    waited_for: int = 0  # of those of activations, in which forward and backward wait


class ImaginedComm(SoloComm):
    """A job of `size` ranks on one host: all others send what this rank sends. `traffic` counts what it sends."""

    def __init__(self, size: int, traffic: Traffic | None = None, rank: int = 0) -> None:
        super().__init__()
        self.size, self.rank = size, rank
        self.local_size, self.local_rank = size, rank
        self.traffic = Traffic() if traffic is None else traffic

    def allreduce(self, tensor: Tensor, *, name: str) -> Finished:  # noqa: D102
        self.traffic.sent += 2 * tensor.nbytes
        return UnderWay(tensor)

    def allgather(self, tensor: Tensor, *, name: str) -> Finished:
        """Return a copy for each rank."""
        self.traffic.sent += self.size * tensor.nbytes
        return UnderWay(torch.cat([tensor] * self.size))

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> Finished:
        """Return a copy."""
        self.traffic.sent += tensor.nbytes
        self.traffic.waited_for += tensor.nbytes
        return UnderWay(tensor.clone())

    def reducescatter(self, tensor: Tensor, *, name: str) -> Finished:
        """Return this rank's share."""
        self.traffic.sent += tensor.nbytes
        return UnderWay(tensor.tensor_split(self.size)[0].clone())

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> ImaginedComm:
        """Return a communicator of as many ranks."""
        return ImaginedComm(len(ranks), self.traffic, local_rank)


@contextmanager
def imagined_ranks(most: int, rank: int = 0) -> Iterator[None]:
    """Make torch's default process group one of `most` ranks, as long as it lasts. Its collectives do nothing.

    This process is `rank`. Within another such context, its group is replaced.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    outer = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    if outer is not None:
        assert dist.get_backend() == "fake", "a real group cannot be made again"
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=most)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if outer is not None:
            dist.init_process_group("fake", store=FakeStore(), rank=outer[0], world_size=outer[1])
