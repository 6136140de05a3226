"""Error feedback: add what an exchange did not deliver to the next gradient.

Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019::

    work_t = residual_t + weight * gradient_t
    out_t = exchange of work_t
    residual_(t+1) = work_t - delivered part of work_t
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, add

from hvdtrain.compression.base import Compressor, Phases, is_finite

RESIDUAL = "residual"  # its name in states: ``parameter/residual``. Each rank has its own; only their sum matters.


class Feedback(Compressor):
    """Keeps the residual of a compressor that was made with ``keep_error=True``.

    One buffer is packed while another one holds the residual. An applied step swaps them. A skipped step, or one with
    inf or nan, leaves the residual unchanged.

    Passes over the bucket in addition to the inner compressor's: 1 to read the residual while packing.
    """

    def __init__(self, inner: Compressor) -> None:
        assert inner.keeps_error, "no error to feed back: make it with keep_error=True"
        self._inner = inner
        self.shape, self.comm, self.keeps_error = inner.shape, inner.comm, True
        self.work, self.views = inner.work, inner.views
        self._residual = inner.make_work()
        self._residuals = [part.view(self._residual) for part in self.shape.parts]

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Pack the sum of residual and weighted gradient, in one pass."""
        if gradient is None:
            self.views[index].copy_(self._residuals[index])
        else:
            add(self._residuals[index], gradient, alpha=weight, out=self.views[index])

    def exchange(self, out: Tensor) -> Phases:  # noqa: D102
        yield from self._inner.exchange(out)

    def figures(self) -> Tensor | None:  # noqa: D102
        return self._inner.figures()

    def commit(self, figures: Sequence[float], *, applied: bool) -> None:
        """Make what the exchange has left in `work` the residual."""
        applied = applied and is_finite(figures)
        self._inner.commit(figures, applied=applied)
        if applied:
            self._inner.use_work(self._residual)
            self._residual, self._residuals = self.work, self.views
            self.work, self.views = self._inner.work, self._inner.views

    def rescale(self, factor: float) -> None:  # noqa: D102
        self._residual.mul_(factor)

    def synchronize_state(self) -> None:
        """Give every rank the mean of the residuals. Collective: yes."""
        self._inner.synchronize_state()
        self._average(self._residual)

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the mean of the residuals, in the buffer that is packed next, and the inner state. Collective: yes."""
        self.work.copy_(self._residual)
        self._average(self.work)
        return {**self._inner.synchronized_state(), **self._by_name(self.views)}

    def _average(self, residual: Tensor) -> None:
        if self.shape.length:
            self.comm.allreduce(residual, name=f"{self.shape.name}/residual").wait()
            residual.div_(self.comm.size)

    def state_dict(self) -> dict[str, Tensor]:  # noqa: D102
        return {**self._inner.state_dict(), **self._by_name(self._residuals)}

    def _by_name(self, residuals: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"{part.name}/{RESIDUAL}": r for part, r in zip(self.shape.parts, residuals, strict=True)}

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Load the residuals, scaled so that their sum over ranks stays the same."""
        self._inner.load_state_dict(state, ranks)
        for part, residual in zip(self.shape.parts, self._residuals, strict=True):
            saved = state.get(f"{part.name}/{RESIDUAL}")
            if saved is None:
                residual.zero_()
            else:
                residual.copy_(saved).mul_(ranks / self.comm.size)

    def buffers(self) -> list[Tensor]:  # noqa: D102
        return [*self._inner.buffers(), self._residual]
