"""One optimizer step over the global batch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.data.tree import Positions
from hvdtrain.engine.base import Engine
from hvdtrain.host_copy import HostCopy
from hvdtrain.spans import JOURNAL_KEYS, Spans
from hvdtrain.task.base import Task
from hvdtrain.training.diagnostics.drift import pass_hashes
from hvdtrain.training.loop.forward import Precision, batch_size, checked_loss, to_device
from hvdtrain.training.loop.step_part import StepPart
from hvdtrain.training.loop.update import StepResult, Update, count_users


@dataclass
class Stepper:
    """Forward, backward, exchange, clip, step; `spans` records their durations.

    Attributes:
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
    global_batch: int  # samples a step over all ranks
    clip: float  # largest norm of the gradient; 0 for no limit
    spans: Spans
    parts: Sequence[StepPart] = ()  # what else takes part in a step
    counts: bool = True  # whether this rank's losses and weights count; of ranks that divide matrices, those of one do
    sharing: int = 1  # number of ranks that have the same samples, and run each pass together
    by_device: bool = False
    ahead: Callable[[], None] = lambda: None  # called while the device updates parameters, before the host waits for it

    def __post_init__(self) -> None:
        """Make the update; find out which parts have which methods, as most have few."""
        self._spans = {name: self.spans(name) for name in JOURNAL_KEYS}
        own = {name: getattr(StepPart, name) for name in ("around_forward", "extra_loss", "start", "wait", "finish")}
        self._having = {n: [p for p in self.parts if getattr(type(p), n) is not default] for n, default in own.items()}
        self.nominal = self.global_batch * float(self.task.nominal_weight)
        self._update = Update(
            self.engine,
            self.precision.scaler,
            self.device,
            self.comm.size,
            self.nominal,
            self.clip,
            self.by_device,
            self.spans.on_synchronized,
        )

    @property
    def passes_alone(self) -> bool:
        """Whether this rank can run a pass without the others."""
        together = self.sharing > 1 or self.engine.uniform_passes
        return not together and not any(part.collective_passes for part in self.parts)

    def run(
        self,
        batches: Iterable[tuple[Callable[[], None], Any]],
        count: int,
        values: list[int],
        extra: int = 0,
        positions: Positions | None = None,
    ) -> StepResult:
        """Train on `count` batches of this rank, each with a function that seeds its forward pass. Collective: yes.

        After them come `extra` ones, which change nothing: they are for an engine with collective forward passes.
        `positions` are those of the batches of all ranks, if all is summed in their order.

        Also sums the integers `values` over ranks.

        Backward divides the losses by a nominal weight of the global batch. The actual weight is known only after the
        exchange; one factor corrects the gradients then.

        If a rank is lost, an error is raised before anything but gradients was changed: the state is that of the
        previous step.
        """
        try:
            engine, spans, having = self.engine, self._spans, self._having
            engine.begin(count + extra, positions)
            self.spans.sizes.pop(self.spans.step, None)  # of a step that is repeated
            for part in self.parts:
                part.begin(count)
            losses, weights = self._passes(batches, count)
            if not count:
                self.precision.scaler.scale(torch.zeros((), device=self.device))  # creates an idle rank's scaler
            for part in having["start"]:
                part.start()
            unused = tuple(engine.unused())
            integers = [*values, *count_users(unused, self.comm.size)]
            if positions is None:
                totals = self._totals(losses, weights, integers)
            else:
                totals = self._placed(losses, weights, integers, positions)
            summed, by_position = self.comm.allreduce(totals, name="step/totals"), None
            with spans["wait"]:
                gradients = engine.finish()
                summed.wait()
                if positions is not None:
                    numbers, rest = torch.split(totals, [2 * positions.count, len(integers)])
                    totals = torch.cat([numbers.view(2, -1).sum(dim=1), rest])
                    by_position = HostCopy(numbers.view(2, -1).T)
                for part in having["wait"]:
                    part.wait()
            with spans["clip"]:
                self._update.decide(gradients, totals, unused, len(values))
                del gradients  # an engine may free them before it gathers parameters
            with spans["optimizer"]:
                self._update.apply()
                if not self.by_device:
                    return self._finished(by_position)
            self.ahead()
            with spans["optimizer"]:
                return self._finished(by_position)
        except BaseException:
            for part in self.parts:
                part.abort()
            raise

    def _finished(self, by_position: HostCopy | None) -> StepResult:
        result = self._update.result()
        if by_position is not None:
            result = replace(result, passes=pass_hashes(by_position.tolist()))
        self.engine.commit(applied=result.applied)
        for part in self._having["finish"]:
            part.finish(self.spans.step, applied=result.applied)
        if result.next_scale != result.scale:
            self.engine.residuals.rescale(result.next_scale / result.scale)
        return result

    def _passes(
        self, batches: Iterable[tuple[Callable[[], None], Any]], count: int
    ) -> tuple[list[Tensor | float], list[Tensor | float]]:
        """Run the passes; return the losses and the weights of this rank's micro-batches, if they count."""
        spans, around_forward, extra_loss = self._spans, self._having["around_forward"], self._having["extra_loss"]
        losses: list[Tensor | float] = []
        weights: list[Tensor | float] = []

        def forward(number: int, seed: Callable[[], None], batch: Any) -> Callable[[], None]:
            with spans["copy"]:
                batch = to_device(batch, self.device)
            seed()
            call = partial(checked_loss, self.task, self.model, batch)
            if number >= count:
                if number == count:
                    for part in self.parts:
                        passes.enter_context(part.around_repeated())  # until all backward passes have ended
                with spans["forward"], self.precision.autocast():
                    loss, _ = self.engine.forward(call)
                return partial(self._backward, loss * 0.0)
            self.spans.add_size(batch_size(batch) // self.sharing)
            contexts = [context for part in around_forward if (context := part.around_forward(batch)) is not None]
            with spans["forward"], self.precision.autocast(), ExitStack() if contexts else nullcontext() as around:
                if around is not None:
                    for context in contexts:
                        around.enter_context(context)
                loss, weight = self.engine.forward(call)
                extras = [extra for part in extra_loss if (extra := part.extra_loss()) is not None]
            if self.counts:
                losses.append(loss.item() if self.device.type == "cpu" else loss.detach())
                weights.append(weight.detach().reshape(()) if isinstance(weight, Tensor) else weight)
            whole = sum(extras, loss)
            return partial(self._backward, self.precision.scaler.scale(whole / self.nominal))

        with ExitStack() as passes:
            if count:
                passes.enter_context(self.precision.weights(self.engine.complete))
            self.engine.accumulate(partial(forward, number, *each) for number, each in enumerate(batches))
        return losses, weights

    def _backward(self, loss: Tensor) -> None:
        with self._spans["backward"]:
            self.engine.backward(loss)

    def _placed(
        self, losses: list[Tensor | float], weights: list[Tensor | float], values: list[int], positions: Positions
    ) -> Tensor:
        """Return losses and weights by position among those of all ranks, and `values`: float64, on the device."""
        numbers = torch.zeros(2, positions.count, dtype=torch.float64, device=self.device)
        mine = positions.shares[self.comm.rank]
        for row, parts in zip(numbers, (losses, weights), strict=True):
            for position, part in zip(mine, parts, strict=True):
                row[position] = part
        return torch.cat(
            [numbers.flatten(), torch.tensor(values, dtype=torch.float64).to(self.device, non_blocking=True)]
        )

    def _totals(self, losses: list[Tensor | float], weights: list[Tensor | float], values: list[int]) -> Tensor:
        """Return this rank's sum of losses, sum of weights, and `values`: float64, on the device."""
        if self.device.type == "cpu":
            return torch.frombuffer(array("d", [sum(losses), sum(weights), *values]), dtype=torch.float64)
        # The host does not wait for the device: its numbers are copied there.
        columns = [[part for part in parts if isinstance(part, Tensor)] for parts in (losses, weights)]
        on_host = [sum(part for part in parts if not isinstance(part, Tensor)) for parts in (losses, weights)]
        totals = torch.tensor([*on_host, *values], dtype=torch.float64).to(self.device, non_blocking=True)
        for total, parts in zip(totals[:2], columns, strict=True):
            if parts:
                total += torch.stack(parts).sum(dtype=torch.float64)
        return totals
