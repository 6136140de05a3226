"""Count the bytes of live tensors of this process that are neither parameters, buffers, inputs nor activations.

What remains is the optimizer's state, gradients, and the memory of their exchange. A tensor counts with its whole
storage, once, whoever shares it. Tensors that only C++ holds are not visible, such as the buckets of torch's
DistributedDataParallel; gradients and the state of optimizers are always visible.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

INDICES = (torch.int64, torch.int32, torch.bool)
"""Types of inputs, orders and masks, not of gradients and states."""
PROFILED = ("call", "return", "c_return")


@dataclass
class Peak:
    """The largest count so far, in bytes, and where it was counted.

    Attributes:
        total: of all that counts; `state` and `gradients` are parts of it.
        sizes: of the largest storages.
    """

    total: int = 0
    state: int = 0
    gradients: int = 0
    sizes: Sequence[int] = ()
    moment: str = ""


@dataclass
class LiveBytes:
    """Counts at every call, return and call of C by the code in `code`, from the first `begin` to `close`.

    Autograd runs the hooks of gradients on a CPU in the thread of backward, so these calls are among them.

    Attributes:
        model: of the task.
        code: beginnings of file names.
        peaks: of each step.
    """

    model: torch.nn.Module
    code: Sequence[str]
    peaks: list[Peak] = field(default_factory=list)
    _known: list[weakref.ref[Tensor]] = field(default_factory=list)
    _before: list[weakref.ref[Tensor]] = field(default_factory=list)
    _inputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Leave out what lives already, which is the data; note each optimizer that takes a step."""
        self._before = [weakref.ref(tensor) for tensor in _tensors(gc.get_objects())]
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizers.add(optimizer))

    def begin(self, batch: Any) -> None:
        """Begin a step, and end the last one."""
        self._end()
        gc.collect()
        self._known = [known for known in self._known if known() is not None]
        self._known += [weakref.ref(tensor) for tensor in _tensors(gc.get_objects())]
        gc.freeze()  # so that later only younger objects are listed
        self._inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        self.peaks.append(Peak())
        self.count("begin")
        sys.setprofile(self._on_call)

    def close(self) -> None:
        """End the last step."""
        self._end()
        gc.unfreeze()
        self._hook.remove()

    def _end(self) -> None:
        sys.setprofile(None)
        if self.peaks:
            self.count("end")
        self._inputs = []

    def count(self, moment: str) -> None:
        """Count now."""
        parameters = [*self.model.parameters(), *self.model.buffers()]
        known = [tensor for reference in self._known if (tensor := reference()) is not None]
        young = list(_tensors(gc.get_objects()))
        before = [tensor for reference in self._before if (tensor := reference()) is not None]
        activations = [tensor for tensor in (*young, *known) if tensor.grad_fn is not None]
        excluded = _storages([*parameters, *before, *activations, *self._inputs])
        gradients = [p.grad for p in (*parameters, *known) if p.is_leaf and p.grad is not None]
        counted = [tensor for tensor in (*young, *known, *gradients) if tensor.dtype not in INDICES]
        found = {place: size for place, size in _storages(counted).items() if place not in excluded}
        total = sum(found.values())
        if total > self.peaks[-1].total:
            state = [t for o in self._optimizers for t in tree_leaves(list(o.state.values())) if isinstance(t, Tensor)]
            parts = [sum(found.get(place, 0) for place in _storages(part)) for part in (state, gradients)]
            self.peaks[-1] = Peak(total, *parts, sorted(found.values(), reverse=True)[:12], moment)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event in PROFILED and file.startswith(tuple(self.code)):
            self.count(f"{event} at {file.rpartition('/')[2]}:{frame.f_lineno}")


def _tensors(objects: Iterable[object]) -> Iterator[Tensor]:
    return (o for o in objects if issubclass(type(o), Tensor) and o.device.type == "cpu")  # type: ignore[attr-defined, misc]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size of each storage by its address."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
