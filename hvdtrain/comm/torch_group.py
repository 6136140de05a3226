"""The ranks of a job that torchrun started, by torch.distributed: Gloo for tensors on CPUs, NCCL for those on GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import ImaginedComm
from hvdtrain.comm.torch_order import Order, Started, TorchHandle, naming_lost_rank
from hvdtrain.comm.torch_store import FOREVER, join_default_group, store_of_torchrun, store_over
from hvdtrain.runtime.environment import RankInfo

_lasting: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_comms = 0  # communicators that this process has made: each has its own keys in the store


def new_group(comm: Comm, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a process group of torch with `ranks` of `comm`, which contain this one (default: all).

    Collective: yes, among all ranks of `comm`, which may give different `ranks`. torch's default group is made first,
    and kept until the process ends: a program may make it only once. End the new one by `dist.destroy_process_group`.
    """
    group: dist.ProcessGroup
    if isinstance(comm, ImaginedComm):  # among `imagined_ranks`: its collectives do nothing
        group = dist.new_group(list(range(comm.size) if ranks is None else ranks))
        return group
    join_default_group(None if dist.is_initialized() else store_over(comm), comm.rank, comm.size)
    backend = "cpu:gloo,cuda:gloo" if getattr(comm, "through_host", False) else None  # NCCL needs a GPU a rank
    group = dist.new_group(ranks, FOREVER, backend, use_local_synchronization=ranks is not None)
    return group


def lasting_group(comm: Comm, ranks: Sequence[int], use: str = "") -> dist.ProcessGroup:
    """Return the process group of `ranks`, which contain this one, for a `use`; the same for all engines of a process.

    torch remembers meshes by their ranks, and a mesh has its group. Collective: yes, among all ranks of `comm`.
    """
    if isinstance(comm, ImaginedComm):  # its groups end with `imagined_ranks`
        return new_group(comm, ranks)
    if (key := (use, tuple(ranks))) not in _lasting:
        _lasting[key] = new_group(comm, ranks)
    return _lasting[key]


def join_torchrun(info: RankInfo) -> TorchComm:
    """Join the ranks that torchrun started. Collective: yes. Errors: LaunchError."""
    store = store_of_torchrun(info)
    join_default_group(dist.PrefixStore("group", store), info.rank, info.size)
    return TorchComm(info, store)


class TorchComm:
    """All ranks of a job, or a `subset`, by torch.distributed.

    On CPU tensors, collectives may begin in any order: they run in one order on all ranks, which costs some exchanges
    with a store on rank 0 (or torchrun's). On GPU tensors they must begin in the same order on all ranks, also relative
    to those of DDP, so that NCCL cannot deadlock; the trainer's do. Tensors are moved as bytes, so that any dtype is
    allowed; sums are limited to the backend's dtypes.

    `through_host`: whether tensors go through host memory, because ranks share a CUDA device.
    """

    through_host = False

    def __init__(self, ranks: RankInfo | Comm, store: dist.Store, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, which has these ranks, and `store`, which serves them all. Collective: yes.

        Default: torch's default group.
        """
        global _comms
        _comms += 1
        self._store, self._group = store, group
        self.rank, self.size = ranks.rank, ranks.size
        self.local_rank, self.local_size = ranks.local_rank, ranks.local_size
        self.in_flight: dict[str, float] = {}
        self._order = Order(dist.PrefixStore(f"comm/{_comms}", store), self.size)

    def allreduce(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Sum over ranks, in place. Collective: yes."""
        sent = self._sent(tensor)

        def start() -> Started:
            work = dist.all_reduce(sent, group=self._group, async_op=True) if sent.numel() else None
            return work, lambda: _into(tensor, sent)

        return self._begin(name, sent, start)

    def allgather(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Concatenate along dimension 0. Collective: yes."""
        sent = self._sent(tensor)

        def start() -> Started:
            rows = [count for (count,) in self._counts(name, sent, [len(sent)])]
            most = max(rows)
            padded = sent if len(sent) == most else torch.cat([sent, sent.new_empty(most - len(sent), *sent.shape[1:])])
            found = sent.new_empty(self.size * most, *sent.shape[1:])
            parts = list(_bytes(found).chunk(self.size))
            work = dist.all_gather(parts, _bytes(padded), self._group, async_op=True) if found.numel() else None
            kept = [found[rank * most : rank * most + count] for rank, count in enumerate(rows)]
            return work, lambda: (found if min(rows) == most else torch.cat(kept)).to(tensor.device)

        return self._begin(name, sent, start)

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> TorchHandle:
        """Exchange shares of dimension 0. Collective: yes."""
        sent = self._sent(tensor)

        def start() -> Started:
            if rows is None:
                equal = torch.empty_like(sent)
                return (self._exchange(equal, sent) if sent.numel() else None), lambda: equal.to(tensor.device)
            table = self._counts(name, sent, rows)
            received = [counts[self.rank] for counts in table]
            found = sent.new_empty(sum(received), *sent.shape[1:])
            row = math.prod(sent.shape[1:]) * sent.element_size()
            shares = [[count * row for count in counts] for counts in (received, rows)]
            work = self._exchange(found, sent, *shares) if any(map(any, table)) else None
            return work, lambda: found.to(tensor.device)

        return self._begin(name, sent, start)

    def reducescatter(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Sum over ranks and return this rank's share. Collective: yes."""
        sent = self._sent(tensor)
        each, more = divmod(len(sent), self.size)
        shares = [each + (rank < more) for rank in range(self.size)]
        row = sent[0].numel() * sent.element_size() if len(sent) else 0
        found = sent.new_empty(self.size, shares[self.rank], *sent.shape[1:])

        def start() -> Started:
            # Equal bytes on the network as a reduce-scatter, which takes only equal shares.
            given, received = [share * row for share in shares], [shares[self.rank] * row] * self.size
            work = self._exchange(found, sent, received, given) if sent.numel() else None
            return work, lambda: found.sum(0, dtype=sent.dtype).to(tensor.device)

        return self._begin(name, sent, start)

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> TorchHandle:
        """Overwrite with the tensor of `root`, in place. Collective: yes."""
        sent = self._sent(tensor)

        def start() -> Started:
            work = (
                dist.broadcast(_bytes(sent), group=self._group, async_op=True, group_src=root) if sent.numel() else None
            )
            return work, lambda: _into(tensor, sent)

        return self._begin(name, sent, start)

    def barrier(self) -> None:
        """Wait for every rank. Collective: yes."""
        self.allreduce(torch.zeros(1), name="barrier").wait()

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> TorchComm:
        """Return a communicator of some ranks. Collective: yes, among them."""
        place = RankInfo("", ranks.index(self.rank), len(ranks), local_rank, local_size)
        names = "-".join(map(str, ranks))
        found = TorchComm(place, dist.PrefixStore(f"ranks/{names}", self._store), new_group(self, ranks))
        found.in_flight, found.through_host = self.in_flight, self.through_host
        return found

    def close(self) -> None:
        """Leave torch's default group. Collective: yes."""
        dist.destroy_process_group()

    def _begin(self, name: str, sent: Tensor, begin: Callable[[], Started]) -> TorchHandle:
        handle = TorchHandle(name, self.in_flight, begin)
        if sent.is_cuda:
            handle.start()
            return handle
        with naming_lost_rank(f"the collective {name}"):
            self._order.announce(name, handle)
        return handle

    def _counts(self, name: str, sent: Tensor, counts: Sequence[int]) -> list[list[int]]:
        table = torch.zeros(self.size, len(counts), dtype=torch.int64)
        table[self.rank] = torch.tensor(counts)
        if sent.is_cuda:  # in the thread of the caller
            self.allreduce(table, name=f"{name}/rows").wait()
        else:
            dist.all_reduce(table, group=self._group)
        return table.tolist()

    def _exchange(
        self, found: Tensor, sent: Tensor, received: list[int] | None = None, given: list[int] | None = None
    ) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(
            _bytes(found), _bytes(sent), received, given, group=self._group, async_op=True
        )
        return work

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the backend takes: `tensor` itself, or a copy."""
        held = tensor.detach()
        return (held.to("cpu", copy=True) if self.through_host and held.is_cuda else held).contiguous()


def _into(tensor: Tensor, result: Tensor) -> Tensor:
    """Write a result to the caller's tensor, unless it is there."""
    if result.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(result)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
