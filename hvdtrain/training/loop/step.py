"""One optimizer step over the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.engine.base import Engine
from hvdtrain.host_copy import HostCopy
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task
from hvdtrain.training.loop.balance_loss import BalanceLoss
from hvdtrain.training.loop.buffers import Rollback, restored_buffers
from hvdtrain.training.loop.forward import Precision, batch_size, checked_loss, to_device
from hvdtrain.training.loop.router_loads import RouterLoads
from hvdtrain.training.loop.shared_buffers import SharedBuffers
from hvdtrain.training.loop.sync_batch_norm import Statistics
from hvdtrain.training.loop.unused_parameters import begin_momentum, count_users, used_by_nobody

_COUNT = 5
"""Numbers that decide on a step: see `Stepper._numbers`."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, equal on all ranks.

    Attributes:
        loss: mean over the weight of the global batch.
        weight: of the global batch.
        grad_norm: L2 norm of the mean gradient, before clipping.
        applied: False if the loss or the gradient was not finite; then nothing was changed.
        sums: sum over ranks of each integer given to `Stepper.run`.
        scale: loss scale of the step.
        next_scale: loss scale of the next one.
    """

    loss: float
    weight: float
    grad_norm: float
    applied: bool
    sums: list[int]
    scale: float = 1.0
    next_scale: float = 1.0


@dataclass
class Stepper:
    """Forward, backward, exchange, clip, step; `spans` records their durations.

    Attributes:
        global_batch: samples a step over all ranks.
        clip: largest norm of the gradient; 0 for no limit.
        buffers: makes buffers that differ between ranks equal after each step.
        counts: whether this rank's losses and weights count; of ranks that divide matrices, those of one do.
        sharing: number of ranks that have the same samples, and run each pass together.
        loads: of the experts of a mixture; None without experts.
        balance: the auxiliary loss of experts; None without. The loss in a result is without it.
        batch_norm: what synchronized batch norm shares; None without.
        around: makes a context for each forward pass.
        confirms: whether a collective on the CPU confirms, before a step is applied, that no rank was lost. Without it
            NCCL in an elastic job would be believed: it completes the collectives of a lost rank as if they had
            succeeded, with any values.
        by_device: whether the optimizer reads on the device whether to step, and by how much its gradients are scaled.
            The host then learns the result of the step while the device updates the parameters. It waits first if this
            rank has not used a parameter, which the update leaves out if nobody has, and in the first applied step of
            each parameter: a first step of torch's fused SGD that is skipped on the device leaves its momentum
            uninitialized.
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
    counts: bool = True
    sharing: int = 1
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    loads: RouterLoads | None = None
    balance: BalanceLoss | None = None
    batch_norm: Statistics | None = None
    confirms: bool = False
    by_device: bool = False

    def __post_init__(self) -> None:
        """Make the rollback of buffers."""
        self._rollback = Rollback(self.model)
        self._no_scales = torch.ones(2, dtype=torch.float64, device=self.device)
        self._updated: set[Tensor] = set()  # parameters that the host has decided to update

    def run(
        self, batches: Iterable[tuple[Callable[[], None], Any]], count: int, values: list[int], extra: int = 0
    ) -> StepResult:
        """Train on `count` batches of this rank, each with a function that seeds its forward pass. Collective: yes.

        After them come `extra` ones, which change nothing: they are for an engine with collective forward passes.

        Also sums the integers `values` over ranks.

        Backward divides the losses by a nominal weight of the global batch. The actual weight is known only after the
        exchange; one factor corrects the gradients then.

        If a rank is lost, an error is raised before anything but gradients was changed: the state is that of the
        previous step.
        """
        try:
            return self._run(batches, count, values, extra)
        except BaseException:
            if self._writes_buffers(count):
                self._rollback.end(applied=False)
            raise

    def _writes_buffers(self, count: int) -> bool:
        return count > 0 or self.batch_norm is not None

    def _run(
        self, batches: Iterable[tuple[Callable[[], None], Any]], count: int, values: list[int], extra: int
    ) -> StepResult:
        if self.loads is not None:
            self.loads.begin()
        counting = nullcontext if self.loads is None else self.loads.counting
        collecting = (lambda batch: nullcontext()) if self.balance is None else self.balance.collecting_from
        nominal = self.global_batch * float(self.task.nominal_weight)
        self.engine.begin(count + extra)
        self.spans.sizes.pop(self.spans.step, None)  # of a step that is repeated
        if self._writes_buffers(count):
            self._rollback.begin()
        losses: list[Tensor] = []
        weights: list[Tensor | float] = []

        def forward(number: int, seed: Callable[[], None], batch: Any) -> Callable[[], None]:
            with self.spans("copy"):
                batch = to_device(batch, self.device)
            seed()
            call = partial(checked_loss, self.task, self.model, batch)
            if number >= count:
                if number == count:
                    passes.enter_context(restored_buffers(self.model))  # until all backward passes have ended
                    if self.batch_norm is not None:
                        self.batch_norm.counts = False
                with self.spans("forward"), self.precision.autocast():
                    loss, _ = self.engine.forward(call)
                return partial(self._backward, loss * 0.0)
            self.spans.add_size(batch_size(batch) // self.sharing)
            with self.spans("forward"), self.precision.autocast(), self.around(), counting(), collecting(batch):
                loss, weight = self.engine.forward(call)
                extra = None if self.balance is None else self.balance.pop()
            if self.counts:
                losses.append(loss.detach())
                weights.append(weight.detach().reshape(()) if isinstance(weight, Tensor) else weight)
            whole = loss if extra is None else loss + extra
            return partial(self._backward, self.precision.scaler.scale(whole / nominal))

        if self.batch_norm is not None:
            self.batch_norm.counts = True
        with ExitStack() as passes:
            if count:
                passes.enter_context(self.precision.weights(self.engine.complete))
            self.engine.accumulate(partial(forward, number, *each) for number, each in enumerate(batches))
        if not count:
            self.precision.scaler.scale(torch.zeros((), device=self.device))  # creates an idle rank's scaler
        self.buffers.start(count)
        if self.loads is not None:
            self.loads.start()
        unused = self.engine.unused()
        totals = self._totals(losses, weights, [*values, *count_users(unused, self.comm.size)])
        summed = self.comm.allreduce(totals, name="step/totals")
        with self.spans("wait"):
            gradients = self.engine.finish()
            summed.wait()
            if self.confirms:
                self._confirm()
        with self.spans("clip"):
            numbers = self._numbers(gradients, totals)
            # Before the update of the parameters, so that it does not wait for it.
            copy = HostCopy(numbers, self.spans.on_synchronized)
            updates_first = self.by_device and not any(unused) and self._with_gradient() <= self._updated
            result = None if updates_first else self._result(copy.tolist(), nominal)
            if result is not None and not self.by_device:
                self._scale(gradients, result, nominal)
            if result is not None and result.applied and any(unused):
                self.engine.leave_out(used_by_nobody(result.sums[len(values) :], unused, self.comm.size))
            del gradients  # an engine may free them before it gathers parameters
        with self.spans("optimizer"):
            if result is None or result.applied:
                if result is not None and not (updated := self._with_gradient()) <= self._updated:
                    begin_momentum(self.engine.optimizer)
                    self._updated |= updated
                self._update(numbers, nominal)
            if result is None:
                result = self._result(copy.tolist(), nominal)
            self.engine.commit(applied=result.applied)
            self.buffers.finish(applied=result.applied)
            if self.loads is not None:
                self.loads.finish(self.spans.step, applied=result.applied)
            if self._writes_buffers(count):
                self._rollback.end(applied=result.applied)
            if result.next_scale != result.scale:
                self.engine.rescale(result.next_scale / result.scale)
        return replace(result, sums=result.sums[: len(values)])

    def _with_gradient(self) -> set[Tensor]:
        """Return the parameters of the optimizer that it updates now."""
        return {p for group in self.engine.optimizer.param_groups for p in group["params"] if p.grad is not None}

    def _backward(self, loss: Tensor) -> None:
        with self.spans("backward"):
            self.engine.backward(loss)

    def _confirm(self) -> None:
        """Wait until the device has done all collectives of the step; then sum a number on the CPU over all ranks.

        Errors: HorovodInternalError if a rank is lost.
        """
        self.buffers.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.comm.allreduce(torch.zeros(1), name="step/confirm").wait()

    def _totals(self, losses: list[Tensor], weights: list[Tensor | float], values: list[int]) -> Tensor:
        """Return this rank's sum of losses, sum of weights, and `values`: float64, on the device."""
        if self.device.type == "cpu":
            return torch.tensor([sum(map(float, losses)), sum(map(float, weights)), *values], dtype=torch.float64)
        # The host does not wait for the device: its numbers are copied there.
        totals = torch.tensor([0.0, 0.0, *values], dtype=torch.float64).to(self.device, non_blocking=True)
        for loss, weight in zip(losses, weights, strict=True):
            totals[0] += loss
            totals[1] += weight
        return totals

    def _numbers(self, gradients: list[Tensor], totals: Tensor) -> Tensor:
        """Unscale the gradients; return all that decides on the step: `_COUNT` numbers, then the summed integers.

        They are the loss scales of this and the next step, the norm of the gradients, the sums of losses and weights.
        """
        scaler = self.precision.scaler
        if scaler.is_enabled():
            scaler.unscale_(self.engine.optimizer)
        norm = self.engine.norm(gradients).detach().to(self.device)
        scales = [self._no_scales]
        if scaler.is_enabled():
            one = torch.ones(1, device=self.device)
            scales = [scaler.scale(one).double()]
            # Another rank may have found the overflow, or the norm overflows although no gradient does.
            found = scaler._per_optimizer_states[id(self.engine.optimizer)]["found_inf_per_device"]
            found[self.device] = (~torch.isfinite(norm)).float()
            scaler.update()
            scales.append(scaler.scale(one).double())
        return torch.cat([*scales, norm.double().reshape(1), totals])

    def _result(self, numbers: list[float], nominal: float) -> StepResult:
        """Return the result of a step from its `numbers`, on the host."""
        scale, next_scale, norm, loss_sum, weight = numbers[:_COUNT]
        loss = loss_sum / weight if weight > 0 else math.nan
        grad_norm = norm * (nominal / weight) if weight > 0 else math.nan
        applied = math.isfinite(grad_norm) and math.isfinite(loss)
        return StepResult(loss, weight, grad_norm, applied, [round(n) for n in numbers[_COUNT:]], scale, next_scale)

    def _scale(self, gradients: list[Tensor], result: StepResult, nominal: float) -> None:
        """Scale gradients to those of the mean over the actual weight, clipped."""
        if not (result.applied and gradients):
            return
        scale = nominal / result.weight * (min(1.0, self.clip / (result.grad_norm + 1e-6)) if self.clip else 1.0)
        if scale != 1.0:
            # On a CPU a tensor is faster than a number by a sixth.
            torch._foreach_mul_(gradients, torch.tensor(scale) if self.device.type == "cpu" else scale)

    def _update(self, numbers: Tensor, nominal: float) -> None:
        """Update the parameters; by the device, do what `_result` and `_scale` do within a fused optimizer's kernels.

        torch's GradScaler passes its findings in the same two attributes. The kernels divide by `grad_scale`.
        """
        if not self.by_device:
            self.engine.step()
            return
        norm, loss_sum, weight = numbers[2:_COUNT]
        correction = torch.where(weight > 0, nominal / weight, math.nan)
        grad_norm = norm * correction
        applied = torch.isfinite(grad_norm) & torch.isfinite(loss_sum / weight)
        scale = correction * (self.clip / (grad_norm + 1e-6)).clamp(max=1.0) if self.clip else correction
        optimizer: Any = self.engine.optimizer
        optimizer.found_inf, optimizer.grad_scale = (~applied).float(), (1 / scale).float()
        try:
            self.engine.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads `found_inf` and `grad_scale` on the device, as torch's own fused ones do.

    Others, such as those of Apex, set the same mark and take a GradScaler instead.
    """
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
