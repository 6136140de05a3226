"""The buckets in use, and the state of compressors that survives a change of buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from hvdtrain.compression.base import Compressor
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.buckets import Named, Plan
from hvdtrain.exchange.residual_transfer import DetachedState, residual_key


class ActiveBuckets:
    """The buckets in use; none until their plan is known.

    Args:
        make: makes the exchange of a plan, for the current ranks and parameters.
        ranks: world size.

    Attributes:
        exchange: the exchange of the buckets in use.
        detached: state of compressors that belongs to no bucket.
    """

    def __init__(self, make: Callable[[Plan], BucketExchange], ranks: int) -> None:
        self._make = make
        self._ranks = ranks
        self.exchange: BucketExchange | None = None
        self.detached = DetachedState({}, ranks)
        self._delivered: list[str] = []

    def adopt(self, plan: Plan, parameters: Collection[str]) -> BucketExchange:
        """Make the buckets of a plan and give their compressors the state of these parameters.

        A compressor without error feedback cannot take over a residual: the next exchange adds it to the gradient.
        """
        self.drop()
        exchange = self.exchange = self._make(plan)
        for compressor in exchange.compressors:
            compressor.load_state_dict(self.detached.tensors, self.detached.ranks)
        lossless = [compressor for compressor in exchange.compressors if not compressor.keeps_error]
        names = [p.name for c in lossless for p in c.shape.parts if self.detached.has_residual(p.name)]
        self._delivered = [residual_key(name) for name in names]
        # State of other parameters stays: a frozen parameter may be freed again.
        self.detached = self.detached.without_parameters(parameters, self._ranks, keep=self._delivered)
        exchange.add_residuals({name: self.detached.tensors[residual_key(name)] for name in names})
        return exchange

    def drop(self) -> None:
        """Remove the buckets and keep the state of their compressors."""
        self.detached = self._state()
        self.exchange = None

    def restart(self, ranks: int) -> None:
        """Remove the buckets and keep this rank's residuals, for a job of another world size.

        Other state of compressors must be equal on all ranks. A rank that joins has none, so it is dropped.
        """
        self.detached = self._state().residuals_only(ranks)
        self.exchange = None
        self._ranks = ranks

    def finite(self) -> bool:
        """Whether the sums are finite, as far as compressors with state or loss check it. Equal on all ranks."""
        return all(compressor.finite() for compressor in self._compressors())

    def commit(self, *, applied: bool) -> None:
        """Keep the changes of the exchange to compressors' state; drop them if the step was not applied."""
        for compressor in self._compressors():
            compressor.commit(applied=applied)
        if applied and self._delivered and self.exchange is not None:
            self.detached = self.detached.without_keys(self._delivered)
            self._delivered = []
            self.exchange.add_residuals({})

    def rescale(self, factor: float) -> None:
        """Multiply all residuals, because gradients are multiplied by `factor` from now on."""
        self.detached.rescale(factor)
        for compressor in self._compressors():
            compressor.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the state equal on all ranks, so that one rank can save it. Collective: yes."""
        for compressor in self._compressors():
            compressor.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the tensors that `synchronize_state` would make, without changing the state. Collective: yes.

        They are valid until the next step.
        """
        attached = {k: t for compressor in self._compressors() for k, t in compressor.synchronized_state().items()}
        return {**self.detached.tensors, **attached}

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors (not copied) and plain values; equal on all ranks after `synchronize_state`."""
        state = self._state()
        return dict(state.tensors), {"plan": self.exchange and asdict(self.exchange.plan), "ranks": state.ranks}

    def load_state_dict(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], known: Named, limit_bytes: int
    ) -> None:
        """Load a state. Its plan is ignored if it has other parameters than `known` or another size of buckets."""
        self.exchange = None
        self.detached = DetachedState(tensors, int(values["ranks"]))
        if (saved := values["plan"]) is not None:
            plan = Plan.from_saved(saved)
            if plan.fits(known) and plan.limit_bytes == limit_bytes:
                with_residual = [name for name in plan.rows if self.detached.has_residual(name)]
                self.adopt(plan.without_rows(with_residual), dict(known))

    def _state(self) -> DetachedState:
        if self.exchange is None:
            return self.detached
        attached = {k: t for compressor in self._compressors() for k, t in compressor.state_dict().items()}
        return DetachedState({**self.detached.tensors, **attached}, self._ranks)

    def _compressors(self) -> Sequence[Compressor]:
        return self.exchange.compressors if self.exchange else ()
