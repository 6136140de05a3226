"""Error feedback: what an exchange did not deliver is added to the next gradient.

Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019::

    work_t = residual_t + weight * gradient_t
    out_t = exchange of work_t
    residual_(t+1) = work_t - what of it was delivered
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, add

from hvdtrain.compression.base import Compressor, Phases

RESIDUAL = "residual"
"""What it is called in states: ``parameter/residual``. Each rank has its own; of them only the sum matters."""


class Feedback(Compressor):
    """Keeps the residual of a compressor that was made with ``keep_error=True``.

    Two buffers of the inner one's `work` take turns: one is packed while the other holds the residual, and a step that
    was applied swaps them. One that was not, or that brought inf or nan, leaves the residual as it was.

    Passes over the bucket beside the inner one's: 1 to read the residual while packing.
    """

    def __init__(self, inner: Compressor) -> None:
        assert inner.keeps_error, "nothing to feed back: make it with keep_error=True"
        self._inner = inner
        self.shape, self.comm, self.keeps_error = inner.shape, inner.comm, True
        self.work, self.places = inner.work, inner.places
        self._residual = inner.make_work()
        self._residuals = [part.view(self._residual) for part in self.shape.parts]

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Put residual and weighted gradient into its place, in one pass."""
        if gradient is None:
            self.places[index].copy_(self._residuals[index])
        else:
            add(self._residuals[index], gradient, alpha=weight, out=self.places[index])

    def exchange(self, out: Tensor) -> Phases:
        """As the inner one does it."""
        yield from self._inner.exchange(out)

    def finite(self) -> bool:
        """Whether the inner one's sum is."""
        return self._inner.finite()

    def commit(self, *, applied: bool) -> None:
        """Make what the exchange has left the residual."""
        applied = applied and self._inner.finite()
        self._inner.commit(applied=applied)
        if applied:
            self._inner.hold(self._residual)
            self._residual, self._residuals = self.work, self.places
            self.work, self.places = self._inner.work, self._inner.places

    def rescale(self, factor: float) -> None:
        """Multiply the residual."""
        self._residual.mul_(factor)

    def synchronize_state(self) -> None:
        """Give every rank the mean of the residuals. Collective: yes."""
        self._inner.synchronize_state()
        self._mean(self._residual)

    def synchronized_state(self) -> dict[str, Tensor]:
        """The mean of the residuals, in the buffer that is packed next, and the inner one's. Collective: yes."""
        self.work.copy_(self._residual)
        self._mean(self.work)
        return {**self._inner.synchronized_state(), **self._named(self.places)}

    def _mean(self, residual: Tensor) -> None:
        if self.shape.length:
            self.comm.allreduce(residual, name=f"{self.shape.name}/residual").wait()
            residual.div_(self.comm.size)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals, and the inner one's state."""
        return {**self._inner.state_dict(), **self._named(self._residuals)}

    def _named(self, residuals: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"{part.name}/{RESIDUAL}": r for part, r in zip(self.shape.parts, residuals, strict=True)}

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Take the residuals over; each rank's is scaled so that they come to the same sum."""
        self._inner.load_state_dict(state, ranks)
        for part, residual in zip(self.shape.parts, self._residuals, strict=True):
            saved = state.get(f"{part.name}/{RESIDUAL}")
            if saved is None:
                residual.zero_()
            else:
                residual.copy_(saved).mul_(ranks / self.comm.size)

    def buffers(self) -> list[Tensor]:
        """The memory it takes."""
        return [*self._inner.buffers(), self._residual]
