"""A divided optimizer in a user's own loop: gradients that arrive drive the engine that `make_sharded` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.engine.among_copies import AmongCopies
from hvdtrain.engine.base import Engine
from hvdtrain.errors import CallOrderError, TaskError
from hvdtrain.exchange.backward_passes import BackwardPasses, FinishedGradients, SentGradient, uncompiled
from hvdtrain.exchange.own_loop import Sums


class DividedReducer(Sums):
    """Sums gradients at their owners, as `exchange.reducer.Reducer` does on all ranks.

    The gradients of the model are `SentGradient`s from their exchange until they are cleared; those of what this rank
    owns always are, except in `exposed`.

    Args:
        engine: its exchange is begun by gradients.
        named: the optimizer's parameters.
        comm: the ranks.
        name: prefix of the collectives' names.
        passes: backward passes per step.
        weight: of the engine.
        factor: applied to each sum after the exchange.
        sums_each_pass: exchange the gradients of each pass, instead of once a step. All ranks exchange equally often.
    """

    def __init__(
        self,
        engine: Engine,
        named: Sequence[tuple[str, nn.Parameter]],
        comm: Comm,
        *,
        name: str,
        passes: int,
        weight: float,
        factor: float,
        sums_each_pass: bool,
    ) -> None:
        assert isinstance(engine.sums, AmongCopies)
        self.engine, self._exchange = engine, engine.sums
        self.before: Callable[[], None] = lambda: None
        self.over = False
        self.comm, self.device = comm, named[0][1].device
        self._named, self._name, self._weight, self._factor = named, name, weight, factor
        self._passes, self._sums_each_pass = BackwardPasses(passes), sums_each_pass
        self._sent = {name: SentGradient(parameter, name) for name, parameter in named}
        owned = self._exchange.owned().items()
        self._own = {
            own.parameter: SentGradient(own.parameter, name) for name, own in owned if own.parameter is not None
        }
        self._sums: list[tuple[nn.Parameter, Tensor]] = []
        self._finished = FinishedGradients(detect_changes=True)
        self._places = [_place(parameter) for _, parameter in named]
        self._hooks: dict[str, Any] = {}
        self._fresh = True
        self._hide()
        self._exchange.on_gradient = uncompiled(self._on_gradient)
        self.refresh()

    def refresh(self) -> None:
        """Look for changes of the parameters. Collective: yes, if some were frozen or freed.

        Errors: TaskError: a parameter was moved to other memory, or added to the optimizer.
        """
        for (name, parameter), place in zip(self._named, self._places, strict=True):
            if _place(parameter) != place:
                raise TaskError(
                    f"{name} was moved to other memory, but its optimizer is divided among ranks",
                    expected="parameters that stay where they were when DistributedOptimizer was called",
                    next_step="move and cast the model before; later, change parameters in place: p.copy_(values)",
                )
        self._exchange.refresh()
        self._exchange.begin_exchange()
        if self._sums_each_pass:
            for name, parameter in self._named:
                if parameter.requires_grad and name not in self._hooks:
                    hook: Any = uncompiled(partial(self._before_gradient, name, parameter))
                    self._hooks[name] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Drop the current step and start another one."""
        self._finished.clear()
        self._passes.begin()
        self._sums.clear()
        self.engine.commit(applied=False)
        self._exchange.clear()
        self.over = False
        self._fresh = True

    def _before_gradient(self, name: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        """End a pass: a parameter gets another gradient, and the one of the pass before was sent."""
        if parameter.grad is self._sent[name] and self._passes.begins_another(name):
            self._end_pass()

    def _end_pass(self) -> None:
        self._release()
        self._exchange.sum_pass()

    def _release(self) -> None:
        """Check that no gradient has changed that was sent, and let the parameters have none."""
        self._finished.check_unchanged(self._named)
        self._finished.clear()
        for _, parameter in self._named:
            if isinstance(parameter.grad, SentGradient):
                parameter.grad = None

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        if self.over:
            self.commit(applied=False)
            self.forget()
        self._begin_once()
        if not self._passes.record_gradient(name) and not self._sums_each_pass:
            return
        self._exchange.add_gradient(name, parameter)
        self._finished.add(name, sent := self._sent[name])
        parameter.grad = sent

    def finish(self) -> list[Tensor]:
        """Exchange the remaining gradients, and return the sums of what this rank owns. Collective: yes.

        Errors: CallOrderError: a gradient was changed after its backward pass.
        """
        self._begin_once()
        self._passes.last = False
        if self._sums_each_pass:  # ranks with fewer passes take part with zeros
            for _ in range(max(1, self._passes.number), self._passes.count):
                self._end_pass()
        self._release()
        for parameter in self._own:
            parameter.grad = None
        gradients = self.engine.finish()
        if self._factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, self._factor)
        self._sums = [(p, p.grad) for p in self._own if p.grad is not None]
        self._hide()
        for name, parameter in self._named:
            if parameter.requires_grad:
                parameter.grad = self._sent[name]
        self.over = True
        return gradients

    def _hide(self) -> None:
        for parameter, sent in self._own.items():
            parameter.grad = sent

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Return a context in which the sums are the gradients of what this rank owns."""
        for parameter in self._own:
            parameter.grad = None
        for parameter, total in self._sums:
            parameter.grad = total
        try:
            yield
        finally:
            self._hide()

    def sums(self) -> list[Tensor]:
        """Return the sums of what this rank owns."""
        return [total for _, total in self._sums]

    def update(self, update: Callable[..., Any]) -> Any:
        """Run the update of what this rank owns, and wait until all ranks have its result. Collective: yes.

        Errors: CallOrderError: a gradient was cleared or replaced after the sum.
        """
        for name, parameter in self._named:
            if parameter.requires_grad and parameter.grad is not self._sent[name]:
                raise CallOrderError(
                    f"the gradient of {name} was cleared or replaced after the gradients were summed",
                    next_step="to leave out a step, call optimizer.zero_grad() on every rank instead of step()",
                )
        self._exchange.take_changes()
        with self.exposed():
            result = update()
        self._sums.clear()
        self._exchange.send()
        self.engine.complete()
        return result

    def close(self) -> None:  # noqa: D102
        self.engine.close()

    @property
    def cleared(self) -> bool:
        """Whether the program has cleared the gradients of the model after their sum, by itself."""
        return self.over and not any(isinstance(parameter.grad, SentGradient) for _, parameter in self._named)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients of the model."""
        for _, parameter in self._named:
            gradient = parameter.grad
            keep = gradient is not None and not set_to_none and not isinstance(gradient, SentGradient)
            parameter.grad = gradient.detach().zero_() if keep and gradient is not None else None

    @property
    def begun(self) -> bool:
        """Whether a gradient of this step was sent."""
        return bool(self._finished) or self._passes.number > 1

    @property
    def keeps_error(self) -> bool:
        """Whether the compression uses error feedback."""
        return self._exchange.keeps_error

    def finite(self) -> bool:
        """Whether the sums are finite, if they were compressed; equal on all ranks. Collective: yes, then."""
        if self.engine.compression == "none":
            return True
        return bool(torch.isfinite(self.engine.norm(self.sums())))

    def overflow(self, found: Sequence[Tensor]) -> Tensor:
        """Return 1 if one of the numbers that a rank has `found` is not zero, else 0. Collective: yes."""
        any_here = torch.zeros(1, device=self.device)
        for number in found:
            any_here += number.to(self.device)
        return self.comm.allreduce(any_here, name=f"{self._name}/overflow").wait().clamp_(max=1.0).reshape(())

    def restart(self, comm: Comm, weight: float, factor: float) -> None:
        """Refuse other ranks. Errors: TaskError."""
        raise TaskError(
            "the ranks may have changed: hvd.init() or hvd.join() was called after DistributedOptimizer",
            expected="the same ranks in all steps, because the optimizer is divided among them",
            next_step="omit hvd.join() and give each rank the same number of batches, or do not divide the optimizer"
            ' (shard="none")',
        )

    def commit(self, *, applied: bool) -> None:
        """Keep the new residuals of the compression, or the old ones if the step was not applied."""
        self.engine.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        self.engine.residuals.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the residuals equal on all ranks, and the model's parameters exact. Collective: yes."""
        self._exchange.take_changes()
        self.engine.residuals.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """Synchronize the state, and return its tensors. Collective: yes."""
        self.synchronize_state()
        return self.state_dict()[0]

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state of the compression, equal on all ranks after `synchronize_state`."""
        return self.engine.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load a state of the compression."""
        self.engine.load_state_dict(tensors, values)


def _place(parameter: Tensor) -> tuple[int, torch.dtype, torch.Size]:
    return parameter.data_ptr(), parameter.dtype, parameter.shape
