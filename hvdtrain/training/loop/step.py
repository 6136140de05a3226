"""One optimizer step over the global batch."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.engine.base import Engine
from hvdtrain.errors import TaskError
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.loop.buffers import Rollback
from hvdtrain.training.loop.precision import Precision
from hvdtrain.training.loop.shared_buffers import SharedBuffers


@dataclass(frozen=True)
class StepResult:
    """What a step did, equal on all ranks.

    Attributes:
        loss: mean over the weight of the global batch.
        weight: of the global batch.
        grad_norm: L2 norm of the mean gradient, before clipping.
        applied: False where loss or gradient was not finite, and nothing was changed.
        notices: sum over ranks of each number that was given to `Stepper.run`.
        scale: the loss scale of a step that was not applied.
    """

    loss: float
    weight: float
    grad_norm: float
    applied: bool
    notices: list[int]
    scale: float = 1.0


@dataclass
class Stepper:
    """Forward, backward, exchange, clip, step.

    Attributes:
        task: loss and nominal weight.
        model: on `device`.
        engine: the optimizer and its exchange.
        comm: the ranks.
        precision: of forward and backward.
        device: where batches go.
        global_batch: samples a step over all ranks.
        clip: largest norm of the gradient, 0 for any.
        spans: takes the durations.
        buffers: makes those that differ between ranks equal after each step.
        around: makes what each forward pass is run in.
    """

    task: Task
    model: nn.Module
    engine: Engine
    comm: Comm
    precision: Precision
    device: torch.device
    global_batch: int
    clip: float
    spans: Spans
    buffers: SharedBuffers
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __post_init__(self) -> None:
        """Make what undoes a forward pass."""
        self._rollback = Rollback(self.model)

    def run(self, batches: Iterable[tuple[Callable[[], None], Any]], count: int, notices: list[int]) -> StepResult:
        """Train on `count` batches of this rank, each with what seeds its forward pass. Collective: yes.

        Gradients are those of the sum of losses over a nominal weight of the global batch; what the actual weight
        is, is known to all only after the exchange, and corrected by one factor then.

        Where a rank is lost in it, an error comes before anything but gradients was changed: the state is that of the
        step before.
        """
        try:
            return self._run(batches, count, notices)
        except BaseException:
            if count:
                self._rollback.end(applied=False)
            raise

    def _run(self, batches: Iterable[tuple[Callable[[], None], Any]], count: int, notices: list[int]) -> StepResult:
        nominal = self.global_batch * float(self.task.nominal_weight)
        self.engine.begin(count)
        if count:
            self._rollback.begin()
        losses: list[Tensor] = []
        weights: list[Tensor | float] = []
        for seed, batch in batches:
            with self.spans("copy"):
                batch = to_device(batch, self.device)
            seed()
            with self.spans("forward"), self.precision.autocast(), self.around():
                loss, weight = checked_loss(self.task, self.model, batch)
            with self.spans("backward"):
                self.engine.backward(self.precision.scaler.scale(loss / nominal))
            losses.append(loss.detach())
            weights.append(weight.detach().reshape(()) if isinstance(weight, Tensor) else weight)
        if not count:
            self.precision.scaler.scale(torch.zeros((), device=self.device))  # an idle rank's scaler is made by this
        self.buffers.start(count)
        totals = self._totals(losses, weights, notices)
        summed = self.comm.allreduce(totals, name="step/totals")
        with self.spans("wait"):
            gradients = self.engine.finish()
            summed.wait()
        with self.spans("clip"):
            result = self._agree(gradients, totals, nominal)
        with self.spans("optimizer"):
            if result.applied:
                self.engine.step()
            self.engine.commit(applied=result.applied)
            self.buffers.finish(applied=result.applied)
            if count:
                self._rollback.end(applied=result.applied)
            if self.precision.scaler.is_enabled():
                self._update_scale()
        return result

    def _update_scale(self) -> None:
        scaler = self.precision.scaler
        before = scaler.get_scale()
        scaler.update()
        if (after := scaler.get_scale()) != before:
            self.engine.rescale(after / before)

    def _totals(self, losses: list[Tensor], weights: list[Tensor | float], notices: list[int]) -> Tensor:
        """Sum of losses, sum of weights and the notices of this rank: float64, on the device."""
        if self.device.type == "cpu":
            return torch.tensor([sum(map(float, losses)), sum(map(float, weights)), *notices], dtype=torch.float64)
        # Without waiting for the device: what is known on the host goes there.
        totals = torch.tensor([0.0, 0.0, *notices], dtype=torch.float64).to(self.device, non_blocking=True)
        for loss, weight in zip(losses, weights, strict=True):
            totals[0] += loss
            totals[1] += weight
        return totals

    def _agree(self, gradients: list[Tensor], totals: Tensor, nominal: float) -> StepResult:
        """What the step came to; gradients become those of the mean over the actual weight, clipped."""
        scaler = self.precision.scaler
        if scaler.is_enabled():
            scaler.unscale_(self.engine.optimizer)
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.device)
        *numbers, raw_norm = torch.cat([totals, norm.detach().double().reshape(1)]).tolist()
        loss_sum, weight = numbers[:2]
        correction = nominal / weight if weight > 0 else math.nan
        grad_norm = raw_norm * correction
        loss = loss_sum / weight if weight > 0 else math.nan
        applied = math.isfinite(grad_norm) and math.isfinite(loss)
        if applied:
            scale = correction * (min(1.0, self.clip / (grad_norm + 1e-6)) if self.clip else 1.0)
            if scale != 1.0 and gradients:
                # As a tensor on the CPU, where it is faster by a sixth than a number.
                torch._foreach_mul_(gradients, torch.tensor(scale) if self.device.type == "cpu" else scale)
        loss_scale = 1.0 if applied else scaler.get_scale()
        return StepResult(loss, weight, grad_norm, applied, [round(n) for n in numbers[2:]], loss_scale)


def checked_loss(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | float]:
    """The task's loss sum and weight.

    Errors:
        TaskError: the loss function returned something else, or a weight that is negative or not finite.
    """
    result: Any = task.loss(model, batch)
    if isinstance(result, tuple) and len(result) == 2:
        loss, weight = result
        if isinstance(weight, Real):  # numpy's numbers as well, which the journal could not hold
            weight = float(weight)
        scalar_weight = isinstance(weight, float) or (isinstance(weight, Tensor) and weight.numel() == 1)
        ssh_command = isinstance(weight, float) or (scalar_weight and not weight.is_cuda)
        if ssh_command and not 0 <= float(weight) < math.inf:  # on a GPU the sum over the global batch is looked at
            raise TaskError(
                "the task's loss function returned a weight that makes no sense",
                expected="how many samples or tokens the loss sums: 0 or more, and finite",
                found=str(float(weight)),
            )
        if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() and scalar_weight:
            return loss, weight
    raise TaskError(
        "the task's loss function returned the wrong thing",
        expected="(loss, weight): the sum of the losses as a scalar tensor, and how many samples or tokens it sums",
        found=describe(result),
    )


def checked_metrics(task: Task, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor | float, Tensor | float]]:
    """The task's metrics: sum and weight by name.

    Errors:
        TaskError: the function returned something else.
    """
    result: Any = task.metrics(model, batch) if task.metrics else {}
    if isinstance(result, Mapping) and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair)) for pair in result.values()
    ):
        return dict(result)
    raise TaskError(
        "the task's metrics function returned the wrong thing",
        expected="a dict of (sum, weight) by name: the sum over the batch, and how many samples or tokens it sums",
        found=describe(result),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def describe(value: Any) -> str:
    """A value's type, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of ({', '.join(describe(v) for v in value)})"
    return f"{type(value).__name__} {value!r}"[:200]


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors on `device`, in nested tuples, lists and dicts, and what has a method `to`; the rest as it is.

    A batch of transformers' collators is a `UserDict`.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, UserDict):
        moved = copy.copy(batch)
        moved.data = to_device(batch.data, device)
        return moved
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
