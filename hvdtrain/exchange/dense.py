"""The bucket of dense gradients, which a compressor sums in one flat buffer."""

from __future__ import annotations

from torch import Tensor

from hvdtrain.compression.base import Compressor, Phases
from hvdtrain.exchange.bucket import Bucket
from hvdtrain.exchange.buckets import Layout


class DenseBucket(Bucket):
    """Gradients that a compressor sums.

    Args:
        layout: of the bucket.
        compressor: sums them.
        factor: applied to the sum.
        as_views: as for `Bucket`.

    Attributes:
        compressor: as given.
        residuals: by index, residuals that the compressor cannot take over; each is packed with its gradient.
        out: (length,) the sums, in the dtype of the gradients.
    """

    def __init__(self, layout: Layout, compressor: Compressor, factor: float = 1.0, *, as_views: bool = True) -> None:
        super().__init__(layout, as_views=as_views)
        self.compressor = compressor
        self.out = compressor.make_out()
        self._views = [part.view(self.out) for part in layout.shape.parts]
        self._factor = factor
        self.residuals: dict[int, Tensor] = {}

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        if (residual := self.residuals.get(index)) is not None:
            residual = residual.to(self.layout.shape.device) / weight
            gradient = (residual if gradient is None else residual + gradient).to(self.layout.shape.dtype)
        self.compressor.pack(index, gradient, weight)

    def _exchange(self) -> Phases:
        yield from self.compressor.exchange(self.out)
        if self._factor != 1.0:
            self.out.mul_(self._factor)

    def _sums(self) -> list[Tensor]:
        # One view per parameter: a norm over 30 MB summed in fp32 is off by 2e-4, that of the parts by 6e-6.
        return self._views
