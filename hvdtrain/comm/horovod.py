"""The ranks of a Horovod job. The only module that imports Horovod."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.comm.base import kept_for_stream
from hvdtrain.errors import HorovodError, JoinedError, UnreachableError
from hvdtrain.install import record
from hvdtrain.runtime.environment import refuse_early_completion
from hvdtrain.runtime.threads import thread_ids

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
    from horovod.torch import mpi_ops
except ImportError as _error:
    record.check()
    raise HorovodError(
        f"Horovod cannot be loaded: {_error}", next_step="build it for this torch and MPI: hvdtrain build-horovod"
    ) from _error

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "hvd", "mpi_ops"]  # what other modules use of Horovod

_session = 0
_groups: dict[tuple[int, ...], Any] = {}  # the process sets that Horovod was initialised with, by their ranks


def session() -> int:
    """Return how often Horovod was initialised again: facts about other ranks from before are then invalid."""
    return _session


def begin_session() -> None:
    """Increment the session number."""
    global _session
    _session += 1


def on_host_updates(listener: Any) -> None:
    """Have Horovod's own elastic driver report host changes by `listener.on_hosts_updated`.

    It opens a port on all interfaces and unpickles what arrives there; messages are signed by a key that was sent to
    the driver unencrypted.
    """
    from horovod.common.elastic import notification_manager

    notification_manager.init()
    notification_manager.register_listener(listener)


def notify_host_update(number: int) -> None:
    """Make the next commit of a training `State` end the round. `number`: grows with each round."""
    from horovod.common.elastic import notification_manager
    from horovod.runner.elastic.worker import HostUpdateResult

    notification_manager.handle_hosts_updated(number, HostUpdateResult.mixed)


class HorovodHandle:
    """A collective that Horovod's background thread executes."""

    def __init__(self, handle: Any, name: str, in_flight: dict[str, float], finish: Callable[[Tensor], Tensor]) -> None:
        self._handle, self._name, self._in_flight, self._finish = handle, name, in_flight, finish
        self._result: Tensor | None = None

    def done(self) -> bool:
        """Check whether `wait` would return at once."""
        return self._result is not None or bool(mpi_ops.poll(self._handle))

    def wait(self) -> Tensor:
        """Block until the collective is complete and return its result.

        Errors: JoinedError if a rank has joined, and this is not a sum.
        """
        if self._result is None:
            try:
                result = mpi_ops.synchronize(self._handle)
            except HorovodInternalError as error:
                if "not supported with Join" in str(error):
                    del self._in_flight[self._name]  # it is over; a collective that a lost rank interrupts stays listed
                    raise JoinedError(
                        f"{self._name} cannot be exchanged: another rank has called hvd.join() and now takes part only"
                        " in sums",
                        expected='compression "none", "fp16" or "powersgd", and no sparse gradients but with'
                        " sparse_as_dense=True",
                        next_step="or give each rank the same number of batches, and omit join",
                    ) from None
                raise
            self._in_flight.pop(self._name, None)
            # alltoall returns (rows, number of rows from each rank)
            self._result = self._finish(result[0] if isinstance(result, tuple) else result)
        return kept_for_stream(self._result)


class HorovodComm:
    """All ranks of a job that a launcher started, with Horovod initialised.

    Horovod has no bfloat16 (horovod/horovod#4047): a collective that sums it raises ValueError; one that only moves it
    sends the same bits as fp16.

    Args:
        process_set: a subset of the ranks that contains this one; rank and size are those within it (default: all).
        groups: ranks of each `subset` that will be made; equal on all ranks. Horovod learns them only at its start.

    Errors: UnreachableError: the ranks did not find each other. LaunchError on a GPU, if Horovod would report an
    exchange as complete before it is.

    Attributes:
        through_host: whether tensors go through host memory, by MPI or Gloo, because ranks share a CUDA device, which
            NCCL does not support. Each collective then waits for the device, twice.
    """

    through_host = False

    def __init__(self, process_set: Any = hvd.global_process_set, groups: Sequence[Sequence[int]] = ()) -> None:
        if torch.cuda.is_available():
            refuse_early_completion()
        before = thread_ids()
        if not hvd.is_initialized():  # by the program
            sets = {tuple(ranks): hvd.ProcessSet(list(ranks)) for ranks in groups}
            try:
                hvd.init(process_sets=list(sets.values()))
            except ValueError as error:  # it has logged the reason
                raise UnreachableError(
                    "Horovod could not be initialized",
                    expected="each rank finds the others within HOROVOD_GLOO_TIMEOUT_SECONDS (30 by default) and then"
                    " hears from them",
                    found=str(error).partition("\n")[0],
                    next_step="see Horovod's messages above, and the errors of other ranks; where only time was short:"
                    " horovodrun --gloo-timeout-seconds 300, or hvdtrain launch --gloo-timeout 300",
                ) from error
            _groups.clear()
            _groups.update(sets)
        self.started_threads = thread_ids() - before
        self._set = process_set
        self.rank: int = process_set.rank()
        self.size: int = process_set.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.in_flight: dict[str, float] = {}

    def allreduce(self, tensor: Tensor, *, name: str) -> HorovodHandle:
        """Sum over ranks, in place. Collective: yes."""
        sent = self._on_host(tensor)
        handle = hvd.allreduce_async_(sent, name=name, op=hvd.Sum, process_set=self._set)
        return self._under_way(name, handle, self._into(tensor))

    def allgather(self, tensor: Tensor, *, name: str) -> HorovodHandle:
        """Concatenate along dimension 0. Collective: yes."""
        handle = hvd.allgather_async(self._movable(tensor), name=name, process_set=self._set)
        return self._under_way(name, handle, _like(tensor))

    def alltoall(self, tensor: Tensor, *, name: str, rows: Sequence[int] | None = None) -> HorovodHandle:
        """Exchange shares of dimension 0. Collective: yes."""
        splits = torch.tensor(rows, dtype=torch.int32) if rows is not None else None
        handle = hvd.alltoall_async(self._movable(tensor), splits, name=name, process_set=self._set)
        return self._under_way(name, handle, _like(tensor))

    def reducescatter(self, tensor: Tensor, *, name: str) -> HorovodHandle:
        """Sum over ranks and return this rank's share. Collective: yes."""
        handle = hvd.reducescatter_async(self._on_host(tensor), name=name, op=hvd.Sum, process_set=self._set)
        return self._under_way(name, handle, _like(tensor))

    def broadcast(self, tensor: Tensor, *, name: str, root: int = 0) -> HorovodHandle:
        """Overwrite with the tensor of `root`, in place. Collective: yes."""
        sent = self._movable(tensor)
        handle = hvd.broadcast_async_(sent, self._set.ranks[root], name=name, process_set=self._set)
        return self._under_way(name, handle, self._into(tensor))

    def barrier(self) -> None:
        """Wait for every rank. Collective: yes."""
        self.in_flight["barrier"] = time.monotonic()
        hvd.barrier(process_set=self._set)
        del self.in_flight["barrier"]

    def subset(self, ranks: Sequence[int], local_rank: int, local_size: int) -> HorovodComm:
        """Return a communicator of some ranks, which were in `groups` when Horovod was initialised.

        Errors: HorovodError if the program initialised Horovod itself.
        """
        if (process_set := _groups.get(tuple(ranks))) is None:
            raise HorovodError(
                f"Horovod was initialised without a process set of the ranks {', '.join(map(str, ranks))}",
                next_step="leave out hvd.init(): hvdtrain calls it with the process sets that it needs",
            )
        found = HorovodComm(process_set)
        found.local_rank, found.local_size = local_rank, local_size
        found.in_flight, found.through_host = self.in_flight, self.through_host
        return found

    def add_groups(self, groups: Sequence[Sequence[int]]) -> None:
        """Make a process set for each group; keep those that exist. Collective: yes.

        Horovod must have been initialised with HOROVOD_DYNAMIC_PROCESS_SETS=1.
        """
        for ranks in groups:
            if tuple(ranks) not in _groups:
                _groups[tuple(ranks)] = hvd.add_process_set(list(ranks))

    def start_timeline(self, path: Path) -> None:
        """Record Horovod's Timeline into `path`, truncating it; return when it is open. Affects only rank 0.

        Errors: HorovodError if HOROVOD_TIMELINE=DYNAMIC was not set when Horovod was initialised.
        """
        try:
            hvd.start_timeline(str(path))
        except ValueError as error:
            raise HorovodError(
                f"Horovod was initialised without Timeline: {error}",
                next_step="call hvdtrain before hvd.init(), or set HOROVOD_TIMELINE=DYNAMIC for all ranks",
            ) from None

    def stop_timeline(self) -> None:
        """Stop recording; return when everything is written and the file is closed. Affects only rank 0.

        Errors: HorovodError if Horovod was shut down in between, which closed the file too.
        """
        try:
            hvd.stop_timeline()
        except ValueError as error:
            raise HorovodError(f"Horovod's Timeline was not open: {error}") from None

    def close(self) -> None:
        """Shut Horovod down. Collective: yes."""
        hvd.shutdown()

    def _under_way(self, name: str, handle: Any, finish: Callable[[Tensor], Tensor]) -> HorovodHandle:
        self.in_flight[name] = time.monotonic()
        return HorovodHandle(handle, name, self.in_flight, finish)

    def _on_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", copy=True) if self.through_host else tensor

    def _movable(self, tensor: Tensor) -> Tensor:
        sent = self._on_host(tensor)
        return sent.view(torch.float16) if sent.dtype == torch.bfloat16 else sent

    def _into(self, tensor: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what finishes a collective in place: Horovod's result is `tensor`, or a copy of it on the host."""
        return (lambda result: tensor.copy_(result.view(tensor.dtype))) if self.through_host else lambda result: tensor


def _like(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what gives a result the dtype and device of `tensor`."""
    dtype, device = tensor.dtype, tensor.device
    return lambda result: result.view(dtype).to(device)
