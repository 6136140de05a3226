"""Decide by the sums of a step whether to apply it, and apply it: unscale, clip, update what any rank has used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.engine.base import Engine
from hvdtrain.host_copy import HostCopy

_COUNT = 5
"""Numbers that decide on a step: see `Update._read`."""

_BITS = 52
"""Bits of a whole number that float64 holds exactly."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, equal on all ranks."""

    loss: float  # mean over the weight of the global batch
    weight: float  # of the global batch
    grad_norm: float  # L2 norm of the mean gradient, before clipping
    applied: bool  # False if the loss or the gradient was not finite; then nothing was changed
    sums: list[int]  # sum over ranks of each integer given to `Stepper.run`
    scale: float = 1.0  # loss scale of the step
    next_scale: float = 1.0  # loss scale of the next one
    passes: str = ""  # of `hashes.pass_hashes`; "" unless all is summed by position


@dataclass
class Update:
    """The update of a step, by its sums over ranks."""

    engine: Engine
    scaler: torch.amp.GradScaler  # torch's GradScaler
    device: torch.device
    ranks: int  # that sum
    nominal: float  # weight of the global batch by which backward has divided the losses
    clip: float  # largest norm of the gradient; 0 for no limit
    by_device: bool  # see `Stepper`
    on_synchronized: Callable[[Any, bool], None] | None  # as of `HostCopy`
    _numbers: Tensor | list[float] = field(init=False)
    _copy: HostCopy = field(init=False)
    _count: int = field(default=0, init=False)  # of the caller's integers
    _users: list[int] = field(default_factory=list, init=False)  # the sums of `count_users`
    _result: StepResult | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Start without parameters that the host has decided to update."""
        self._updated: set[Tensor] = set()
        self._notes_updated = self.by_device or isinstance(self.engine.optimizer, torch.optim.SGD)
        self._no_scales = torch.ones(2, dtype=torch.float64, device=self.device)

    def decide(self, gradients: list[Tensor], totals: Tensor, unused: Sequence[bool], count: int) -> None:
        """Scale the gradients, and leave out those of parameters that no rank has used.

        Args:
            gradients: of this rank's optimizer.
            totals: summed over ranks, on the device: loss, weight, `count` integers, then those of `count_users`.
            unused: as of `Engine.unused`.
            count: number of the caller's integers.
        """
        self._numbers, self._count = self._read(gradients, totals), count
        if isinstance(self._numbers, Tensor):  # before the update of the parameters, so that it does not wait for it
            self._copy = HostCopy(self._numbers, self.on_synchronized)
        updates_first = self.by_device and not any(unused) and self._with_gradient() <= self._updated
        self._result = None if updates_first else self._decided()
        if self._result is None or not self._result.applied:
            return
        if not self.by_device and gradients:  # to those of the mean over the actual weight, clipped
            clipped = min(1.0, self.clip / (self._result.grad_norm + 1e-6)) if self.clip else 1.0
            scale = self.nominal / self._result.weight * clipped
            if scale != 1.0:
                # On a CPU a tensor is faster than a number by a sixth.
                torch._foreach_mul_(gradients, torch.scalar_tensor(scale) if self.device.type == "cpu" else scale)
        if any(unused):
            self.engine.leave_out(used_by_nobody(self._users, unused, self.ranks))

    def apply(self) -> None:
        """Update the parameters, unless the step is skipped.

        By the device, do what `decide` does on the host within a fused optimizer's kernels. torch's GradScaler passes
        its findings in the same two attributes. The kernels divide by `grad_scale`.
        """
        if self._result is not None and not self._result.applied:
            return
        if self._notes_updated and self._result is not None and not (new := self._with_gradient()) <= self._updated:
            _begin_momentum(self.engine.optimizer)
            self._updated |= new
        if not self.by_device:
            self.engine.step()
            return
        assert isinstance(self._numbers, Tensor)
        norm, loss_sum, weight = self._numbers[2:_COUNT]
        correction = torch.where(weight > 0, self.nominal / weight, math.nan)
        grad_norm = norm * correction
        applied = torch.isfinite(grad_norm) & torch.isfinite(loss_sum / weight)
        scale = correction * (self.clip / (grad_norm + 1e-6)).clamp(max=1.0) if self.clip else correction
        optimizer: Any = self.engine.optimizer
        optimizer.found_inf, optimizer.grad_scale = (~applied).float(), (1 / scale).float()
        try:
            self.engine.step()
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def result(self) -> StepResult:
        """Return the result of the step; wait for the device if it has decided."""
        return self._result or self._decided()

    def _with_gradient(self) -> set[Tensor]:
        """Return the parameters of the optimizer that it updates now."""
        return {p for group in self.engine.optimizer.param_groups for p in group["params"] if p.grad is not None}

    def _read(self, gradients: list[Tensor], totals: Tensor) -> Tensor | list[float]:
        """Unscale the gradients; return all that decides on the step: `_COUNT` numbers, then the summed integers.

        They are the loss scales of this and the next step, the norm of the gradients, the sums of losses and weights.
        Where all are on the host, they are read at once.
        """
        scaler = self.scaler
        if scaler.is_enabled():
            scaler.unscale_(self.engine.optimizer)
        norm = self.engine.norm(gradients)
        if self.device.type == "cpu" and not self.by_device and not scaler.is_enabled():
            return [1.0, 1.0, norm.item(), *totals.tolist()]
        norm = norm.detach().to(self.device)
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

    def _decided(self) -> StepResult:
        """Return the result of the step, on the host."""
        numbers = self._copy.tolist() if isinstance(self._numbers, Tensor) else self._numbers
        scale, next_scale, norm, loss_sum, weight = numbers[:_COUNT]
        loss = loss_sum / weight if weight > 0 else math.nan
        grad_norm = norm * (self.nominal / weight) if weight > 0 else math.nan
        applied = math.isfinite(grad_norm) and math.isfinite(loss)
        sums = [*map(round, numbers[_COUNT:])]
        self._users = sums[self._count :]
        return StepResult(loss, weight, grad_norm, applied, sums[: self._count], scale, next_scale)


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether an optimizer reads `found_inf` and `grad_scale` on the device, as torch's own fused ones do.

    Others, such as those of Apex, set the same mark and take a GradScaler instead.
    """
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@lru_cache(maxsize=8)
def count_users(unused: tuple[bool, ...], ranks: int) -> list[int]:
    """Return whole numbers. Their sums over `ranks` ranks count the users of each parameter, several in one.

    Args:
        unused: for each parameter, whether this rank has not used it.
        ranks: the world size.
    """
    count, base = _in_one(ranks), ranks + 1
    return [
        sum(base**digit for digit, each in enumerate(unused[begin : begin + count]) if not each)
        for begin in range(0, len(unused), count)
    ]


def used_by_nobody(sums: Sequence[int], unused: Sequence[bool], ranks: int) -> list[int]:
    """Return the positions of the parameters without a user, from the sums of `count_users`."""
    count, base = _in_one(ranks), ranks + 1
    return [n for n, each in enumerate(unused) if each and not sums[n // count] // base ** (n % count) % base]


def _begin_momentum(optimizer: Optimizer) -> None:
    """Give parameters that torch's fused SGD updates for the first time a momentum of zero, if others have one.

    Its kernel takes the momentum of all or of none, and fails otherwise. With dampening zero is not right: it fails.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and not group["dampening"]:
            states = [optimizer.state[parameter] for parameter in group["params"] if parameter.grad is not None]
            if any(state.get("momentum_buffer") is not None for state in states):
                for parameter in group["params"]:
                    if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _in_one(ranks: int) -> int:
    """Return how many counts of at most `ranks` one number holds."""
    return int(_BITS / math.log2(ranks + 1))
