"""The engine: an optimizer, the order of passes, and the sums of gradients. A step reads top down here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.data.tree import Positions
from hvdtrain.engine.schedule import Passes, Schedule
from hvdtrain.engine.sums import Loss, Sums
from hvdtrain.exchange.residuals import Residuals
from hvdtrain.state.exchange_state import Owned
from hvdtrain.state.pieces import Place


class Engine:
    """An optimizer and the exchange of its gradients.

    A step is::

        begin(micro_batches)
        accumulate(passes)          # each runs forward(call) and backward(loss)
        gradients = finish()        # they are sums over ranks and micro-batches now
        leave_out(numbers)
        step()
        commit(applied)

    Args:
        sums: of the gradients; it says how they come about, and who has which.
        schedule: the order of passes.

    Attributes:
        optimizer: of the model.
    """

    def __init__(self, optimizer: Optimizer, sums: Sums, schedule: Schedule | None = None) -> None:
        self.optimizer, self.sums, self.schedule = optimizer, sums, schedule or Schedule()
        sums.schedule = self.schedule

    @property
    def compression(self) -> str:
        """The compression of the exchange; a name in `compression.table`."""
        return self.sums.compression

    @property
    def uniform_passes(self) -> bool:
        """Whether a forward pass is collective, so that all ranks must run equally many, also in an evaluation.

        Ranks with fewer micro-batches repeat one, with weight 0.
        """
        return self.sums.uniform_passes

    @property
    def residuals(self) -> Residuals:
        """What the exchange remembers."""
        return self.sums.residuals

    def begin(self, micro_batches: int, positions: Positions | None = None) -> None:
        """Clear gradients; this rank then runs backward `micro_batches` times, 0 if it is idle.

        Those of weight 0 are included, which `positions` leaves out. Collective: yes, if parameters were added, frozen
        or freed since the last step.
        """
        self.sums.positions = positions
        self.sums.refresh()
        self.optimizer.zero_grad()
        self.schedule.begin(micro_batches)
        self.sums.begin()

    def accumulate(self, passes: Passes) -> None:
        """Run the passes of a step. Each is a function that runs a forward pass, and returns what runs its backward."""
        self.schedule.run(passes)

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of the step: return what `call` returns. `backward` of its loss follows."""
        self.schedule.forward(call)
        return self.sums.forward(call)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, a scalar; the last one of a step starts the exchange."""
        call = self.schedule.backward(loss)
        if self.schedule.begun:
            self.sums.end_pass()
        self.schedule.count()
        self.sums.backward(call)

    def finish(self) -> list[Tensor]:
        """Wait until every gradient is the sum over ranks and micro-batches. Collective: yes.

        Returns the gradients that this rank's optimizer uses; the caller may scale them in place. A parameter that this
        rank has not used, and another rank may have, has a gradient, too.
        """
        return self.sums.finish()

    def unused(self) -> list[bool]:
        """Return for each trained parameter whether this rank has not used it in this step's passes, before `finish`.

        Equally many on all ranks. Empty if parameters without a gradient have none after `finish` anyway, or if the
        engine gives all a gradient.
        """
        return self.sums.unused()

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Remove the gradients of parameters that no rank has used, so that `step` leaves these as they are.

        Those that get a residual of an earlier step stay. Collective: yes.

        Args:
            numbers: positions in the result of `unused`.
        """
        self.sums.leave_out(numbers)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the L2 norm of the whole gradient from those of `finish`, on the device. Collective: yes.

        It is equal on all ranks.
        """
        return self.sums.norm(gradients)

    def step(self) -> None:
        """Run the optimizer with the gradients of `finish`. Where its update is divided, start to send it."""
        self.optimizer.step()
        self.sums.spread()

    def complete(self) -> None:
        """Wait until the parameters of the model are those of the last step; all ranks have started to send them."""
        self.sums.complete()

    def close(self) -> None:
        """Remove all hooks from the parameters and the model."""
        self.schedule.close()
        self.sums.close()

    @property
    def replayable(self) -> bool:
        """Whether a rank can repeat its passes of the last step alone."""
        return True

    def covered(self, step: int) -> range:
        """Return the steps that the model's parameters have gained with step `step`, the last one."""
        return range(step, step + 1)

    def owned(self) -> Mapping[str, Owned] | None:
        """Return the part of each parameter that this rank's optimizer updates, by name; None if it updates all."""
        return self.sums.owned()

    @property
    def in_pieces(self) -> bool:
        """Whether ranks have different parts of the state, so that losing one loses state."""
        return self.owned() is not None

    def commit(self, *, applied: bool) -> None:
        """End the step: keep the new residuals of the compression if it was applied, else the old ones."""
        self.residuals.commit(applied=applied)

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the tensors of the state that the residuals would have, were they synchronized. Collective: yes.

        They are valid until the next step.
        """
        return self.residuals.synchronized_state()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the exchange's state, tensors and plain values; equal on all ranks if it is synchronized."""
        tensors, values = self.residuals.state_dict()
        return tensors, {**values, **self.sums.values()}

    def state_place(self, key: str) -> Place | None:
        """Return the place of a tensor of the state; None if it is whole, and equal on all ranks."""
        return self.residuals.state_place(key)

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return the ranks that each have a residual of their own, where this rank has one; none if all are equal."""
        return self.residuals.residual_ranks(key)

    def keeps(self, key: str) -> bool:
        """Return whether this rank has use for a tensor of the exchange's state."""
        return self.residuals.keeps(key)

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the exchange's state."""
        self.sums.before_load(values)
        self.residuals.load_state_dict(tensors, values)

    def buffers(self) -> list[Tensor]:
        """Return the memory of the exchange, without the gradients."""
        return self.sums.buffers()
