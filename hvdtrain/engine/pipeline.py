"""The engine of ranks that divide the layers of a model: each micro-batch passes through the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.engine.base import Engine
from hvdtrain.engine.mesh import MeshEngine
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.stage import Stage
from hvdtrain.engine.stages import EndOfStage, Pass
from hvdtrain.spans import Spans
from hvdtrain.task.base import Task


class Pipelined(Engine):
    """What engines of pipelines share: the order of passes.

    A subclass has `_pass_back`, which runs a backward pass, and in a step `_remaining`, the number of micro-batches.

    Attributes:
        stage: of this rank.
    """

    stage: Stage
    _spans: Spans
    _remaining: int
    _pass_back: Callable[[Callable[[], None]], None]

    def _make_stage(self, parts: EngineParts) -> None:
        self._spans = parts.spans or Spans()
        self.stage = Stage(parts.model, parts.comm, parts.plan.dimensions, parts.device, self._spans)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run this rank's part of a forward pass. Collective: yes."""
        self.stage.begin(call)
        return super().forward(call)

    def accumulate(self, passes: Iterable[Callable[[], Callable[[], None]]]) -> None:
        """Run the passes, each once for each of this rank's virtual stages."""
        stage, following = self.stage, iter(passes)
        # Passes of each virtual stage: with the last ones, its gradients are complete.
        left = {kind: [self._remaining] * stage.chunks for kind in (Pass.BACKWARD, Pass.WEIGHTS)}
        forwards: dict[int, Callable[[], Callable[[], None]]] = {}
        backwards: dict[tuple[int, int], Callable[[], None]] = {}
        try:
            for kind, number, chunk in stage.order(self._remaining):
                stage.use(chunk, number, backward=kind is Pass.BACKWARD)
                if kind is Pass.FORWARD:
                    if not chunk:
                        forwards[number] = next(following)
                    last = chunk + 1 == stage.chunks
                    backwards[number, chunk] = (forwards.pop(number) if last else forwards[number])()
                    continue
                self._remaining = left[kind][chunk]
                left[kind][chunk] -= 1
                if kind is Pass.BACKWARD:
                    backwards.pop((number, chunk))()
                elif stage.deferred:
                    with self._spans("backward"):
                        self._pass_back(stage.deferred.compute)
        finally:
            stage.use(None)

    def backward(self, loss: Tensor) -> None:
        """Run this rank's part of a backward pass. Collective: yes."""
        self._pass_back(partial(self.stage.backward, loss))

    def close(self) -> None:
        """Remove the hooks."""
        super().close()
        self.stage.close()


class PipelineEngine(Pipelined, MeshEngine):
    """Ranks of a pipeline divide the blocks of a model; other pipelines have copies, with other samples.

    Args:
        parts: the model's parameters become those of rank 0.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._make_stage(parts)
        super().__init__(parts, place=self.stage.place)

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        if not (self.stage.deferred and self.stage.deferred.awaits(parameter)):
            super()._on_gradient(name, parameter)


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

    def no_loss() -> tuple[Tensor, float]:
        return torch.zeros((), device=stage.device), 0.0

    def no_metrics() -> dict[str, tuple[()]]:
        return dict.fromkeys(task.metric_objects, ())

    metrics = None if task.metrics is None else partial(on_stage, task.metrics, no_metrics)
    return replace(task, loss=partial(on_stage, task.loss, no_loss), metrics=metrics)
