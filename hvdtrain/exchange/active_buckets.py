"""The buckets in force, and what compression carries from one set of buckets to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from hvdtrain.compression.base import Compressor
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.buckets import Named, Plan
from hvdtrain.exchange.residual_transfer import Residuals, owed_key


class ActiveBuckets:
    """A flight, or none while its plan is being learned, and the state of compressors that are not its own.

    Args:
        make: a flight of a plan, for the ranks and the parameters that there are then.
        ranks: how many there are.

    Attributes:
        flight: the buckets in force.
        carried: what no bucket holds.
    """

    def __init__(self, make: Callable[[Plan], BucketExchange], ranks: int) -> None:
        self._make = make
        self._ranks = ranks
        self.flight: BucketExchange | None = None
        self.carried = Residuals({}, ranks)
        self._delivered: list[str] = []

    def adopt(self, agreed: Plan, parameters: Collection[str]) -> BucketExchange:
        """Make the buckets of a plan; what compressors knew of these parameters goes with them.

        What is owed to those whose compressor keeps no error is delivered by the next exchange.
        """
        self.drop()
        flight = self.flight = self._make(agreed)
        for compressor in flight.compressors:
            compressor.load_state_dict(self.carried.tensors, self.carried.ranks)
        lossless = [compressor for compressor in flight.compressors if not compressor.keeps_error]
        owed = [p.name for c in lossless for p in c.shape.parts if self.carried.owes(p.name)]
        self._delivered = [owed_key(name) for name in owed]
        # What was frozen may be freed again.
        self.carried = self.carried.without(parameters, self._ranks, keep=self._delivered)
        flight.deliver({name: self.carried.tensors[owed_key(name)] for name in owed})
        return flight

    def drop(self) -> None:
        """Have no buckets, but all that they carried."""
        self.carried = self._all()
        self.flight = None

    def restart(self, ranks: int) -> None:
        """The same among other ranks: what this rank still owes it owes there.

        All else that compression has learned starts anew: it is equal on all ranks, and one that joins lacks it.
        """
        self.carried = self._all().owed(ranks)
        self.flight = None
        self._ranks = ranks

    def finite(self) -> bool:
        """Whether compressors that keep or lose something found what came finite; equal on all ranks."""
        return all(compressor.finite() for compressor in self._compressors())

    def commit(self, *, applied: bool) -> None:
        """Keep what the exchange changed in the compressors' state; if the step was not applied, forget it."""
        for compressor in self._compressors():
            compressor.commit(applied=applied)
        if applied and self._delivered and self.flight is not None:
            self.carried = self.carried.less(self._delivered)
            self._delivered = []
            self.flight.deliver({})

    def rescale(self, factor: float) -> None:
        """Gradients are multiplied by `factor` from now on, and so is what compressors carry to the next step."""
        self.carried.rescale(factor)
        for compressor in self._compressors():
            compressor.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the state the same on all ranks, so that it can be saved by one. Collective: yes."""
        for compressor in self._compressors():
            compressor.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """The tensors as `synchronize_state` would make them, which stay as they are. Collective: yes.

        To be read before the next step.
        """
        held = {k: t for compressor in self._compressors() for k, t in compressor.synchronized_state().items()}
        return {**self.carried.tensors, **held}

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values; after `synchronize_state` equal on all ranks. Tensors are not copied."""
        carried = self._all()
        return dict(carried.tensors), {"plan": self.flight and asdict(self.flight.plan), "ranks": carried.ranks}

    def load_state_dict(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], known: Named, limit_bytes: int
    ) -> None:
        """Take over a state; a plan that is not of the known parameters, or by another limit, is left aside."""
        self.flight = None
        self.carried = Residuals(tensors, int(values["ranks"]))
        if (saved := values["plan"]) is not None:
            agreed = Plan.of_saved(saved)
            if agreed.fits(known) and agreed.limit_bytes == limit_bytes:
                owed = [name for name in agreed.rows if self.carried.owes(name)]
                self.adopt(agreed.without_rows(owed), dict(known))

    def _all(self) -> Residuals:
        if self.flight is None:
            return self.carried
        held = {k: t for compressor in self._compressors() for k, t in compressor.state_dict().items()}
        return Residuals({**self.carried.tensors, **held}, self._ranks)

    def _compressors(self) -> Sequence[Compressor]:
        return self.flight.compressors if self.flight else ()
