"""The contract of what takes part in a step, besides losses, gradients and the update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hvdtrain.comm.base import Comm


class StepPart:
    """Takes part in each step; the defaults do nothing.

    The methods up to `finish` are called once a step in this order; those around passes once a pass. All ranks have the
    same parts in the same order, so that `start`, `wait` and `finish` may be collective.

    Attributes:
        collective_passes: whether a pass is collective because of it, so that no rank can run one alone.
    """

    collective_passes: bool = False
    _hooks: Sequence[RemovableHandle] = ()  # on the model

    def begin(self, count: int) -> None:
        """Start a step; this rank has `count` micro-batches."""

    def around_forward(self, batch: Any) -> AbstractContextManager[object] | None:
        """Return the context of the forward pass of a micro-batch on the device, if any; not of its recomputation."""
        return None

    def extra_loss(self) -> Tensor | None:
        """Return what the forward pass adds to its loss, a scalar; the loss in results is without it."""
        return None

    def around_repeated(self) -> AbstractContextManager[object]:
        """Return the context of passes of weight 0 that follow, which should leave no trace."""
        return nullcontext()

    def start(self) -> None:
        """Begin what ranks do together after their passes."""

    def wait(self) -> None:
        """Wait for what ranks do together; errors end the step here, before it changes anything."""

    def finish(self, step: int, *, applied: bool) -> None:
        """End step `step`, which was applied or skipped."""

    def abort(self) -> None:
        """Restore what the step has changed: an error ends it."""

    def among(self, comm: Comm) -> StepPart:
        """Return this part for the steps of some of the ranks, which train apart."""
        return self

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Confirmation(StepPart):
    """Before a step is applied, confirms by a collective on the CPU that no rank was lost.

    Without it NCCL in an elastic job would be believed: it completes the collectives of a lost rank as if they had
    succeeded, with any values.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm, self._device = comm, device

    def wait(self) -> None:
        """Wait until the device has done all collectives of the step; then sum a number over all ranks.

        Errors: HorovodInternalError if a rank is lost.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._comm.allreduce(torch.zeros(1), name="step/confirm").wait()

    def among(self, comm: Comm) -> StepPart:  # noqa: D102
        return Confirmation(comm, self._device)
