"""Count the bytes of live activations, and what `--memory.checkpointing` saves of them, at what time.

One process; the models of all modes are interleaved. Peak: of one micro-batch. Time: CPU time of a whole step, with
the optimizer.
"""

from __future__ import annotations

import copy
import time
import weakref
from typing import Any

import torch
from common import Figure, figure, in_turn, ratios
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.task.base import Task
from hvdtrain.task.language_model import language_model
from hvdtrain.training.loop.blocks import checkpoint_blocks
from hvdtrain.training.start.optimizers import make_optimizer

MODES = ("none", "full", "selective")
MICRO_BATCH, MICRO_BATCHES = 4, 4
"""The defaults of training, on one rank."""


class Activations(TorchDispatchMode):
    """Counts the storages that operations allocate, while they live; not those inside of an operation.

    Gradients of parameters count only if they do not exist yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(out) if _is_tensor(tensor)):
            if storage.data_ptr() not in given and id(storage) not in self._known:
                self._known.add(id(storage))
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


class Loop:
    """Trains one copy of the model of a task."""

    def __init__(self, task: Task, mode: str) -> None:
        self._loss, self._model = task.loss, copy.deepcopy(task.model)
        checkpoint_blocks(self._model, mode)
        self._optimizer = make_optimizer(self._model, OptimizerConfig())
        samples = [torch.as_tensor(task.train_data[index]) for index in range(MICRO_BATCH)]
        self._batch = torch.stack(samples)

    def peak(self) -> float:
        """Return the peak of activations in a forward and a backward pass."""
        self._pass()
        self._optimizer.zero_grad(set_to_none=False)
        with Activations() as counted:
            self._pass()
        return float(counted.peak)

    def _pass(self) -> None:
        loss, weight = self._loss(self._model, self._batch)
        (loss / weight).backward()  # type: ignore[no-untyped-call]

    def step_s(self) -> float:
        """Return the time of a step."""
        start = time.process_time()
        self._optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            self._pass()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return time.process_time() - start


def measure_checkpointing(steps: int) -> list[Figure]:
    """Return peak and time of each mode, divided by those without."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = language_model()
    loops = {mode: Loop(task, mode) for mode in MODES}
    peaks = {mode: loop.peak() for mode, loop in loops.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(steps):
        for mode in in_turn(MODES, number):
            seconds[mode].append(loops[mode].step_s())
    found = [figure("memory/activations_mib", [peaks["none"] / (1 << 20)], "MiB")]
    for mode in MODES[1:]:
        found.append(figure(f"memory/checkpointing_{mode}", [peaks[mode] / peaks["none"]], "ratio"))
        times = ratios(seconds[mode], seconds["none"])
        found.append(figure(f"memory/checkpointing_{mode}/step_time", times, "ratio"))
    return found
