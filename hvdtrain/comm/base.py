"""The contract of a communicator: named, asynchronous collectives on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


class Handle(Protocol):
    """A running collective."""

    def done(self) -> bool:
        """Check whether `wait` would return at once."""

    def wait(self) -> Tensor:
        """Block until the collective is complete and return its result. Further calls return the same result.

        On a GPU its memory lasts until the current stream has used it: see `kept_for_stream`.
        """


def kept_for_stream(tensor: Tensor) -> Tensor:
    """Return a tensor of another stream. Its memory now lasts until the current stream has used it.

    Otherwise the allocator may give the memory to the other stream as soon as Python has freed the tensor.
    """
    if tensor.is_cuda:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


class Comm(Protocol):
    """The ranks of one job.

    Collectives are matched by ``name``: every rank calls the same names with the same shapes and dtypes, in any order.
    Two collectives that run at the same time have different names. Do not touch a tensor until `wait` of its handle
    returns.
    """

    rank: int  # this process, 0 to size - 1
    size: int  # number of processes
    local_rank: int  # index of this process on its host. Not a device index where each rank sees one GPU
    local_size: int  # number of processes on this host
    # Names of the collectives that this rank has started and not yet waited for, with `time.monotonic` of the start;
    # other threads read it.
    in_flight: dict[str, float]

    def allreduce(self, tensor: Tensor, *, name: str) -> Handle:
        """Sum over ranks, in place; the result is `tensor` itself. Collective: yes."""

    def allgather(self, tensor: Tensor, *, name: str) -> Handle:
        """Concatenate along dimension 0 in rank order; first dimensions may differ. Collective: yes."""

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> Handle:
        """Send a share of dimension 0 to each rank; return those received, in rank order. Collective: yes.

        `rows` of the shares, in rank order (default: equal shares); all ranks give them, or none.
        """

    def reducescatter(self, tensor: Tensor, *, name: str) -> Handle:
        """Sum over ranks and return this rank's share of dimension 0. Collective: yes.

        Shares are as equal as possible; the first ``len % size`` ranks have one row more.
        """

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> Handle:
        """Overwrite `tensor` with that of `root`, in place. Collective: yes."""

    def barrier(self) -> None:
        """Return once every rank has called this. Collective: yes."""

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> Comm:
        """Return a communicator of some ranks, ascending, which contain this one. Collective: yes, among them.

        `local_rank` and `local_size` count those on this host. It ends with this communicator.
        """

    def close(self) -> None:
        """End communication. Collective: yes."""


@runtime_checkable
class TimelineComm(Protocol):
    """A communicator with collectives that Horovod can record."""

    started_threads: frozenset[int]  # the kernel's ids of Horovod's threads

    def start_timeline(self, path: Path) -> None:
        """Record into `path` from now on. Affects only rank 0."""

    def stop_timeline(self) -> None:
        """Write the recording and close the file. Affects only rank 0."""


@runtime_checkable
class GroupingComm(Protocol):
    """A communicator that must know the ranks of each `subset` before."""

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Prepare subsets of these ranks. Collective: yes, also for ranks that are in none of them."""
