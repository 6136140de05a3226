"""Copies of the state in memory: a snapshot, from which a checkpoint is written, and commits to roll back to."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from hvdtrain.state.buddies import Buddies, Copies, HeldCommit
from hvdtrain.state.pieces import Key, Place, StateDict
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.transfer import padded

MAX_COST = 0.01  # largest fraction of the time to spend on commits

_Layout = list[tuple[str, str, torch.Size, torch.dtype]]


class Snapshot:
    """A copy of the newest captured state.

    All tensors share one buffer on the host, which is page-locked if the state is on CUDA. The buffer is allocated by
    the first `capture`, and again when tensors are added or change shape, such as optimizer state in the first step.
    Copying is as fast as copying one tensor of the same size.

    `capture` overwrites the tensors that `state` returned before. Finish reading them first.
    """

    def __init__(self) -> None:
        self.step = -1  # optimizer steps done at the capture; -1 before
        self._layout: _Layout = []
        self._pinned = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._views: list[Tensor] = []
        self._groups: list[str] = []
        self._places: dict[Key, Place] = {}
        self._values = "{}"
        self._copied: torch.cuda.Event | None = None
        self._unpin: Callable[[], object] = lambda: None

    def capture(self, state: StateDict, step: int) -> None:
        """Copy a state with tensors on any devices, of any layout.

        On CUDA this returns before the copies are done. They are on the stream of training, ahead of any change of
        the tensors, and `state` waits for them.
        """
        named = [(group, name, t.detach()) for group, tensors in state.tensors.items() for name, t in tensors.items()]
        layout = [(group, name, tensor.shape, tensor.dtype) for group, name, tensor in named]
        sources = [tensor for _, _, tensor in named]
        device = next((tensor.device for tensor in sources if tensor.is_cuda), None)
        self.step = -1  # in case the copy fails
        self._values = json.dumps(dict(state.values))  # a deep copy, as in a file
        self._groups, self._places = list(state.tensors), dict(state.places)
        if layout != self._layout or (device is not None) != self._pinned:
            self._allocate(layout, device is not None)
        if sources:
            torch._foreach_copy_(self._views, sources, non_blocking=device is not None)
        if device is not None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))
        self.step = step

    @property
    def state(self) -> StateDict:
        """The captured state: views of the buffer, on the CPU, and a new copy of the values."""
        assert self.step >= 0, "nothing was captured"
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        for (group, name, _, _), view in zip(self._layout, self._views, strict=True):
            tensors[group][name] = view
        return StateDict(tensors, json.loads(self._values), self._places)

    def _allocate(self, layout: _Layout, pinned: bool) -> None:
        self._unpin()
        self._views, self._buffer = [], torch.empty(0, dtype=torch.uint8)  # frees the old one first
        places, end = [], 0
        for _, _, shape, dtype in layout:
            places.append(end)
            end += padded(shape.numel() * dtype.itemsize)
        self._buffer = torch.zeros(end, dtype=torch.uint8)  # zeros allocate the pages
        if pinned:  # torch's allocator of page-locked memory rounds sizes up to powers of two and keeps what was freed
            runtime, address = torch.cuda.cudart(), self._buffer.data_ptr()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(address, self._buffer.nbytes, 0))
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
        for place, (_, _, shape, dtype) in zip(places, layout, strict=True):
            part = self._buffer[place : place + shape.numel() * dtype.itemsize]
            self._views.append(part.view(dtype).reshape(shape))
        self._layout, self._pinned = layout, pinned


def is_commit_due(since_s: float, step_s: float, cost_s: float, loss_s: float) -> bool:
    """Return whether the next step, which takes about `step_s` seconds, should end with a commit. Pure.

    It should when commits take at most `MAX_COST` of the time, or if more than `loss_s` could be lost otherwise. The
    last commit was `since_s` seconds ago and took `cost_s`.
    """
    return since_s + step_s >= cost_s / MAX_COST or since_s + 2 * step_s >= loss_s


class Commits:
    """The newest commit of a rank. At most about `loss_s` seconds of training may be lost."""

    def __init__(self, loss_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loss_s = loss_s
        self._clock = clock
        self._asked_s = clock()
        self._at_s = self._cost_s = 0.0
        self._snapshot = Snapshot()
        self._copies: Copies | None = None
        self._unsure: tuple[Snapshot, Copies] | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done at the commit; -1 before the first."""
        return self._snapshot.step

    def due(self) -> bool:
        """Return whether the next step should end with a commit, by this rank's clock. Call it before each step.

        All ranks must follow one rank's answer, which travels with the numbers that a step sums over ranks.
        """
        before_s, self._asked_s = self._asked_s, self._clock()
        since_s, step_s = self._asked_s - self._at_s, self._asked_s - before_s
        return self.step < 0 or is_commit_due(since_s, step_s, self._cost_s, self._loss_s)

    def commit(self, state: TrainState, buddies: Buddies | None = None, *, synchronized: bool = False) -> None:
        """Copy the state, with exchange state equal on all ranks. Collective: yes, unless it is equal, `synchronized`.

        It does not change the state: the time of a commit depends on clocks, but training must not.

        With `buddies` (collective: yes), this rank's pieces are copied to another one, too. The commit counts when all
        ranks have their copies. If a rank is lost while they agree on that, others may have ended the commit before
        they notice. Then this rank keeps both commits: the ranks that remain choose one (`pool_state`).
        """
        began_s = self._clock()
        copied = state.state_dict()
        if not synchronized and state.exchange is not None and (exchange := state.exchange.synchronized_state()):
            copied = replace(copied, tensors={**copied.tensors, "exchange": exchange})
        copies = None
        if buddies is not None:
            copies = buddies.copy(copied)
            try:
                buddies.agree()
            except Exception:
                self._unsure = Snapshot(), copies
                self._unsure[0].capture(copied, state.progress.step)
                raise
        self._snapshot.capture(copied, state.progress.step)
        self._copies, self._unsure = copies, None
        self._at_s = self._clock()
        self._cost_s = self._at_s - began_s

    def held(self) -> list[HeldCommit]:
        """Return the commits with copies for others in this rank's memory, until the next commit."""
        found = [(self._snapshot, self._copies)] if self._copies is not None else []
        found += [self._unsure] if self._unsure is not None else []
        return [HeldCommit(snapshot.step, _with_own_exchange(snapshot.state), copies) for snapshot, copies in found]

    def restore(self, state: TrainState) -> None:
        """Load the newest commit into `state`."""
        state.load_state_dict(_with_own_exchange(self._snapshot.state))


def _with_own_exchange(saved: StateDict) -> StateDict:
    """Copy the exchange's tensors: it keeps them when it loads them, and the next commit overwrites the buffer."""
    exchange = {name: tensor.clone() for name, tensor in saved.tensors.get("exchange", {}).items()}
    return replace(saved, tensors={**saved.tensors, "exchange": exchange})
