"""The order of the passes of a step: one after the other, or as the stages of a pipeline run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.engine.stages import EndOfStage, Pass
from hvdtrain.task.base import Task

if TYPE_CHECKING:
    from hvdtrain.engine.stage import Stage

Passes = Iterable[Callable[[], Callable[[], None]]]
"""Functions that run a forward pass, and return what runs its backward pass."""


class Schedule:
    """One pass after the other; it counts them.

    Attributes:
        left: backward passes of the step that are still to come: 0 in the last one.
        begun: those that have begun.
        stage: of a pipeline; None without.
    """

    stage: Stage | None = None

    def __init__(self) -> None:
        self.left = self.begun = 0

    def begin(self, micro_batches: int) -> None:
        """Expect as many backward passes."""
        self.left, self.begun = micro_batches, 0

    def count(self) -> None:
        """Begin a backward pass."""
        self.left -= 1
        self.begun += 1

    def forward(self, call: Callable[[], Any]) -> None:
        """Note which forward pass begins."""

    def backward(self, loss: Tensor) -> Callable[[], None]:
        """Return what runs the backward pass of a loss."""
        return partial(torch.autograd.backward, loss)

    def run(self, passes: Passes) -> None:
        """Run the passes of a step."""
        for forward in passes:
            forward()()

    def close(self) -> None:
        """Remove all hooks from the model."""


class PipelineSchedule(Schedule):
    """The passes of a stage, each once for each of its virtual stages."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage: Stage = stage

    def forward(self, call: Callable[[], Any]) -> None:
        """Let the stage expect what comes from the one before."""
        self.stage.begin(call)

    def backward(self, loss: Tensor) -> Callable[[], None]:
        """Return what runs this rank's part of a backward pass. Collective: yes."""
        return partial(self.stage.backward, loss)

    def run(self, passes: Passes) -> None:
        """Run the passes in the order of the stage. Collective: yes."""
        stage, following = self.stage, iter(passes)
        # Passes of each virtual stage: with the last ones, its gradients are complete.
        left = [self.left] * stage.chunks
        forwards: dict[int, Callable[[], Callable[[], None]]] = {}
        backwards: dict[tuple[int, int], Callable[[], None]] = {}
        try:
            for kind, number, chunk in stage.order(self.left):
                stage.use(chunk, number)
                if kind is Pass.FORWARD:
                    if not chunk:
                        forwards[number] = next(following)
                    last = chunk + 1 == stage.chunks
                    backwards[number, chunk] = (forwards.pop(number) if last else forwards[number])()
                    continue
                self.left = left[chunk]
                left[chunk] -= 1
                backwards.pop((number, chunk))()
        finally:
            stage.use(None)

    def close(self) -> None:
        """Remove the hooks of the stage."""
        self.stage.close()


def with_stages(task: Task, stage: Stage) -> Task:
    """Return a task with a loss of 0, weight 0 and no metrics on ranks where the pass ends before the loss.

    In a step, its functions run the virtual stage in use; else they run all of this rank, one after the other.
    """
    on_cuda = stage.device.type == "cuda"

    def run(function: Callable[..., Any], at_end: Callable[[], Any], *arguments: Any) -> Any:
        stage.start()
        try:
            found = function(*arguments)
        except EndOfStage:
            found = at_end()
        stage.end()
        return found

    def on_stage(function: Callable[..., Any], at_end: Callable[[], Any], *arguments: Any) -> Any:
        if stage.chunk is not None or stage.chunks == 1:
            return run(function, at_end, *arguments)
        try:
            for chunk in range(stage.chunks):
                stage.use(chunk)
                # Each draws the same random numbers before the blocks, and the last one's are those of the caller.
                is_last = chunk + 1 == stage.chunks
                with nullcontext() if is_last else torch.random.fork_rng([stage.device] if on_cuda else []):
                    found = run(function, at_end, *arguments)
        finally:
            stage.use(None)
        return found

    loss = partial(on_stage, task.loss, lambda: (torch.zeros((), device=stage.device), 0.0))
    metrics = None
    if task.metrics is not None:
        metrics = partial(on_stage, task.metrics, lambda: dict.fromkeys(task.metric_objects, ()))
    return replace(task, loss=loss, metrics=metrics)
