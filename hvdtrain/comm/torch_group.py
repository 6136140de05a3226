"""The ranks of a job that torchrun started, by torch.distributed: Gloo for tensors on CPUs, NCCL for those on GPUs.

torch matches collectives by their order, ours are matched by name: `_Order` makes one order of both.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.comm.torch_store import FOREVER, join_default_group, store_of_torchrun, store_over
from hvdtrain.errors import LostRankError
from hvdtrain.runtime.environment import RankInfo

_CONNECTION = re.compile(
    r"gloo/transport|[Cc]onnection (was )?(closed|reset|refused)|NCCL (error|communicator)|Broken pipe"
)
_BLOCK = 1024
"""Entries of the order that are deleted together, once every rank has read them."""

_comms = 0
"""Communicators that this process has made: each has its own keys in the store."""


def is_lost_rank(error: BaseException) -> bool:
    """Check whether an error of torch means that another rank is lost."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(_CONNECTION.search(str(error)))
    )


def lost_rank(error: BaseException, what: str) -> LostRankError:
    """Return the error to raise instead of torch's. `what`: the collective, or what this rank waited for."""
    return LostRankError(
        f"another rank was lost during {what}",
        found=str(error).strip().partition("\n")[0],
        next_step="look for the first error in the output of the other ranks",
    )


def new_group(comm: Comm) -> dist.ProcessGroup:
    """Make a process group of torch with the ranks of `comm`. Collective: yes. End it by `end_group`.

    torch's default group is made first, and kept until the process ends: a program may make it only once.
    """
    if not dist.is_initialized():
        join_default_group(store_over(comm), comm.rank, comm.size)
    group: dist.ProcessGroup = dist.new_group(timeout=FOREVER)
    return group


def end_group(group: dist.ProcessGroup) -> None:
    """Free a group of `new_group`."""
    dist.destroy_process_group(group)


def join_torchrun(info: RankInfo) -> TorchComm:
    """Join the ranks that torchrun started. Collective: yes. Errors: LaunchError."""
    store = store_of_torchrun(info)
    join_default_group(dist.PrefixStore("group", store), info.rank, info.size)
    return TorchComm(info, store)


class _Order:
    """One order of the collectives on all ranks, kept in a store.

    A rank announces the name of a collective. The last one to announce it appends the name to a log. Each rank issues
    its collectives in the order of the log: every name there has been announced by all, so no rank waits for one that
    it has not begun. A rank reads the log only when it begins, waits for or asks about a collective.
    """

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store, self._size = store, size
        self._announced: dict[str, Callable[[], None]] = {}
        self._next = 0

    def announce(self, name: str, issue: Callable[[], None]) -> None:
        """Have `issue` called once it is the collective's turn."""
        assert name not in self._announced, f"two collectives run at once under the name {name}"
        self._announced[name] = issue
        if self._store.add(f"ready/{name}", 1) == self._size:
            self._store.delete_key(f"ready/{name}")  # before others can announce it again
            self._store.set(f"log/{self._store.add('length', 1) - 1}", name)

    def issue_all_ready(self) -> None:
        """Issue the collectives that are next in the order."""
        while self._announced and self._store.check([f"log/{self._next}"]):
            self._issue_next()

    def wait_for_turn(self, name: str) -> None:
        """Issue collectives up to `name`; return at once if it was issued before."""
        while name in self._announced:
            self._issue_next()

    def _issue_next(self) -> None:
        name = self._store.get(f"log/{self._next}").decode()  # waits until it is there
        self._next += 1
        if self._next % _BLOCK == 0 and self._store.add(f"read/{self._next}", 1) == self._size:
            for key in [f"read/{self._next}", *(f"log/{n}" for n in range(self._next - _BLOCK, self._next))]:
                self._store.delete_key(key)
        self._announced.pop(name)()


Started = tuple["dist.Work | None", Callable[[], Tensor]]
"""A running collective, None if it is complete, and what returns its result then."""


class TorchHandle:
    """A collective of torch, from its announcement to its result."""

    def __init__(self, name: str, comm: TorchComm, start: Callable[[], Started]) -> None:
        self._name, self._comm, self._start = name, comm, start
        self._work: dist.Work | None = None
        self._finish: Callable[[], Tensor] | None = None
        self._result: Tensor | None = None
        comm.in_flight[name] = time.monotonic()

    def issue(self) -> None:
        """Start the collective; it is its turn on every rank."""
        self._work, self._finish = self._start()

    def done(self) -> bool:
        """Check whether `wait` would return at once."""
        if self._result is None and self._finish is None:
            self._comm.order.issue_all_ready()
        issued = self._finish is not None and (self._work is None or self._work.is_completed())
        return self._result is not None or issued

    def wait(self) -> Tensor:
        """Block until the collective is complete and return its result. Errors: LostRankError."""
        if self._result is None:
            try:
                self._comm.order.wait_for_turn(self._name)
                if self._work is not None:
                    self._work.wait()
            except RuntimeError as error:
                if is_lost_rank(error):  # the collective stays listed as in flight
                    raise lost_rank(error, f"the collective {self._name}") from error
                raise
            assert self._finish is not None
            self._result = self._finish()
            self._comm.in_flight.pop(self._name, None)
        return self._result


class TorchComm:
    """All ranks of a job, by torch.distributed. For one thread.

    Collectives may begin in any order. They run in one order on all ranks, which costs three to five exchanges with a
    store on rank 0 (or torchrun's). They make progress only while this rank begins or waits for one, or asks whether
    one is done: do not wait for other ranks by other means before you have waited for them. Tensors are moved as bytes,
    so that any dtype is allowed; sums are limited to the backend's dtypes.

    Attributes:
        order: of the collectives.
        through_host: whether tensors go through host memory, because ranks share a CUDA device.
    """

    through_host = False

    def __init__(self, ranks: RankInfo | Comm, store: dist.Store) -> None:
        """Use the default group, which has these ranks, and `store`, which serves them all. Collective: yes."""
        global _comms
        _comms += 1
        self.rank, self.size = ranks.rank, ranks.size
        self.local_rank, self.local_size = ranks.local_rank, ranks.local_size
        self.in_flight: dict[str, float] = {}
        self.order = _Order(dist.PrefixStore(f"comm/{_comms}", store), self.size)

    def allreduce(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Sum over ranks, in place. Collective: yes."""
        sent = self._sent(tensor)
        return self._begin(name, lambda: (_reduce(sent), lambda: _into(tensor, sent)))

    def allgather(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Concatenate along dimension 0. Collective: yes."""
        sent = self._sent(tensor)

        def start() -> Started:
            rows = torch.zeros(self.size, dtype=torch.int64)
            rows[self.rank] = len(sent)
            dist.all_reduce(rows)
            most = int(rows.max())
            padded = sent if len(sent) == most else torch.cat([sent, sent.new_empty(most - len(sent), *sent.shape[1:])])
            found = sent.new_empty(self.size * most, *sent.shape[1:])
            parts = list(_bytes(found).chunk(self.size))
            work = dist.all_gather(parts, _bytes(padded), async_op=True) if found.numel() else None
            kept = [slice(rank * most, rank * most + count) for rank, count in enumerate(rows.tolist())]
            return work, lambda: (found if rows.min() == most else torch.cat([found[s] for s in kept])).to(
                tensor.device
            )

        return self._begin(name, start)

    def alltoall(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Exchange equal shares of dimension 0. Collective: yes."""
        sent = self._sent(tensor)
        found = torch.empty_like(sent)
        return self._begin(name, lambda: (_exchange(found, sent), lambda: found.to(tensor.device)))

    def reducescatter(self, tensor: Tensor, *, name: str) -> TorchHandle:
        """Sum over ranks and return this rank's share. Collective: yes."""
        sent = self._sent(tensor)
        each, more = divmod(len(sent), self.size)
        shares = [each + (rank < more) for rank in range(self.size)]
        row = sent[0].numel() * sent.element_size() if len(sent) else 0
        found = sent.new_empty(self.size, shares[self.rank], *sent.shape[1:])

        def start() -> Started:
            # Equal bytes on the network as a reduce-scatter, which takes only equal shares.
            work = _exchange(found, sent, [shares[self.rank] * row] * self.size, [share * row for share in shares])
            return work, lambda: found.sum(0, dtype=sent.dtype).to(tensor.device)

        return self._begin(name, start)

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> TorchHandle:
        """Overwrite with the tensor of `root`, in place. Collective: yes."""
        sent = self._sent(tensor)

        def start() -> Started:
            work = dist.broadcast(_bytes(sent), root, async_op=True) if sent.numel() else None
            return work, lambda: _into(tensor, sent)

        return self._begin(name, start)

    def barrier(self) -> None:
        """Wait for every rank. Collective: yes."""
        self.allreduce(torch.zeros(1), name="barrier").wait()

    def close(self) -> None:
        """Leave torch's default group. Collective: yes."""
        dist.destroy_process_group()

    def _begin(self, name: str, start: Callable[[], Started]) -> TorchHandle:
        handle = TorchHandle(name, self, start)
        try:
            self.order.announce(name, handle.issue)
            self.order.issue_all_ready()
        except RuntimeError as error:
            if is_lost_rank(error):
                raise lost_rank(error, f"the collective {name}") from error
            raise
        return handle

    def _sent(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the backend takes: `tensor` itself, or a copy."""
        held = tensor.detach()
        return (held.to("cpu", copy=True) if self.through_host and held.is_cuda else held).contiguous()


def _reduce(tensor: Tensor) -> dist.Work | None:
    return dist.all_reduce(tensor, async_op=True) if tensor.numel() else None


def _exchange(
    found: Tensor, sent: Tensor, received: list[int] | None = None, given: list[int] | None = None
) -> dist.Work | None:
    if not sent.numel():
        return None
    work: dist.Work = dist.all_to_all_single(_bytes(found), _bytes(sent), received, given, async_op=True)
    return work


def _into(tensor: Tensor, result: Tensor) -> Tensor:
    """Write a result to the caller's tensor, unless it is there."""
    if result.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(result)
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)
