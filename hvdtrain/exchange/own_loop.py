"""The exchange of gradients in a user's own loop: `backward`, `step` and `zero_grad` of one optimizer drive it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.comm.base import Comm
from hvdtrain.errors import CallOrderError, ConfigError
from hvdtrain.exchange.backward_passes import BackwardPasses
from hvdtrain.exchange.norms import norm, squared_norm


class Sums(Protocol):
    """The sums of the gradients of each step; for attributes without a text see `Reducer`.

    Attributes:
        comm: the ranks.
        before: called once per step, before everything else.
        over: whether the sums of this step are complete.
    """

    comm: Comm
    before: Callable[[], None]
    over: bool
    _fresh: bool  # whether this step has not begun yet
    _passes: BackwardPasses
    _name: str
    _weight: float
    _factor: float

    def _begin_once(self) -> None:
        if self._fresh:
            self._fresh = False
            self.before()

    def set_passes(self, passes: int) -> None:
        """Expect this many backward passes per step from now on, on every rank."""
        self._passes = BackwardPasses(passes)

    @property
    def begun(self) -> bool:
        """Whether the exchange of this step has begun."""

    @property
    def keeps_error(self) -> bool:
        """Whether the compression uses error feedback."""

    def refresh(self) -> None:
        """Read the parameters again, between two steps."""

    def forget(self) -> None:
        """Drop the current step and start another one."""

    def finish(self) -> list[Tensor]:
        """Exchange the remaining gradients and wait for all. Collective: yes."""

    def finite(self) -> bool:
        """Whether the sums are finite, as far as the compression needs it. Equal on all ranks."""

    def total(self, value: float) -> float:
        """Return a number of this rank, weighted and summed as gradients are. Collective: yes."""
        number = torch.tensor([value * self._weight], dtype=torch.float64)
        return float(self.comm.allreduce(number, name=f"{self._name}/total").wait()) * self._factor

    def commit(self, *, applied: bool) -> None:
        """Keep the changes of the exchange to the compression's state, or drop them."""

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""

    def restart(self, comm: Comm, weight: float, factor: float) -> None:
        """Continue with other ranks."""

    def close(self) -> None:
        """Remove the hooks from the parameters."""


class Exchange:
    """The exchange of one optimizer: a step lasts from its first gradient until the optimizer has used the sums.

    Args:
        reducer: of the gradients; it counts backward passes.
        terms: returns (comm, weight, factor) for `Reducer.restart`.
        session: returns another number after the ranks have changed.
    """

    def __init__(
        self, reducer: Sums, terms: Callable[[], tuple[Any, float, float]], session: Callable[[], int]
    ) -> None:
        self.reducer = reducer
        self._terms = terms
        self._session = session
        self._last_session = session()
        self._skip = False
        self._synchronized = False
        self._warned = self._replaced = False
        reducer.before = self._begin_step
        reducer.forget()  # the first gradient makes it read the parameters

    def _begin_step(self) -> None:
        self._synchronized = False
        if self._session() != self._last_session:
            self.restart()
        self.reducer.refresh()

    def synchronize(self) -> None:
        """Sum the current gradients, even if they were summed before. Collective: yes."""
        if self.reducer.over:
            self._end()
        self.sum_up()
        self._synchronized = True

    def sum_up(self) -> None:
        """Sum the gradients, unless this step has done so before. Collective: yes.

        Errors: CallOrderError: a newer optimizer exchanges gradients of the same parameters.
        """
        if self._replaced:
            raise CallOrderError(
                "a newer DistributedOptimizer exchanges gradients of this one's parameters",
                expected="one DistributedOptimizer for each parameter",
                next_step="use only the newer one, or give each other parameters",
            )
        if not self.reducer.over:
            self.reducer.finish()

    def replace(self) -> None:
        """End the exchange, because another optimizer has begun one of the same gradients."""
        self.reducer.close()
        self._replaced = True

    def clear(self) -> None:
        """Drop the current step, because its gradients will be cleared.

        Errors: CallOrderError: some gradients are being exchanged.
        """
        if self.reducer.over:
            self.reducer.commit(applied=False)
        elif self.reducer.begun:
            raise CallOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or"
                " optimizer.synchronize(), while gradients were being exchanged",
                next_step="call one of them first, on every rank",
            )
        self.forget()

    def zero_grad(self, own: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        """Drop the current step, and clear the gradients by the optimizer's `own` method."""
        self.clear()
        own(*arguments, **keywords)

    def unscale(self, own: Callable[[], dict[torch.device, Tensor]]) -> dict[torch.device, Tensor]:
        """Sum the gradients, and let a GradScaler divide them by its scale.

        Returns, for each device, whether they overflow. Collective: yes.
        """
        self.sum_up()
        return own()

    def clip(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Sum the gradients, and scale them so that their norm is at most `max_norm`. Collective: yes.

        Returns the norm before, equal on all ranks.

        Errors: ConfigError: `max_norm` is negative, or not a number.
        """
        if not max_norm >= 0:
            raise ConfigError("invalid max_norm of clip_grad_norm_", expected="a number >= 0", found=str(max_norm))
        self.sum_up()
        gradients = self._gradients(optimizer)
        total = self._norm(gradients)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))
        return total

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        return norm(squared_norm(gradients))

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Return a context in which a step uses the gradients without an exchange."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, update: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Sum the gradients, let the optimizer `update` the parameters, begin the next step.

        The loss that a closure returns is averaged (or summed) as gradients are.
        """
        if closure is not None:
            return self._step_with(update, closure)
        if self._synchronized and not self._skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize():"
                " it exchanges the gradients a second time, as in Horovod",
                stacklevel=3,
            )
            self.synchronize()
        if not self._skip or self.reducer.begun:
            self.sum_up()
        if self.reducer.over and not self.reducer.finite():
            if not self._warned:
                self._warned = True
                warnings.warn("skipping a step: its compressed gradients are not finite (shown once)", stacklevel=3)
            self.reducer.commit(applied=False)
            self.forget()
            return None
        result = self._update(update)
        self._end()
        return result

    def _update(self, update: Callable[..., Any]) -> Any:
        return update()

    def _step_with(self, update: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        if self.reducer.begun:
            self.sum_up()

        def summed() -> Any:
            if self.reducer.over:
                self._end()
            with torch.enable_grad():
                loss = closure()
            self.sum_up()
            return self._total(loss)  # a line search must decide by the same loss on all ranks

        result = update(summed)
        self._end()
        return result

    def _total(self, loss: Any) -> Any:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return torch.full_like(loss, self.reducer.total(loss.item()))
        return self.reducer.total(loss) if isinstance(loss, float) else loss

    def _end(self) -> None:
        self.reducer.commit(applied=True)
        self.forget()

    def state_dict(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank's optimizer, from its `own` method."""
        return own()

    def gather_state_dict(self, own: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the whole state on rank 0, an empty one on others. Collective: yes, if it is divided."""
        return own() if self._terms()[0].rank == 0 else {}

    def load_state_dict(self, own: Callable[[dict[str, Any]], None], state: dict[str, Any]) -> None:
        """Load a whole state, and drop the current step."""
        own(state)
        self.forget()

    def add_param_group(self, own: Callable[[dict[str, Any]], None], group: dict[str, Any]) -> None:
        """Add parameters; they are exchanged from the next step on."""
        own(group)

    def forget(self) -> None:
        """Drop the current step and start another one."""
        self.reducer.forget()
        self._synchronized = False

    def restart(self) -> None:
        """Start another step with the current ranks."""
        self._last_session = self._session()
        self.reducer.restart(*self._terms())
