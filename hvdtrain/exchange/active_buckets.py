"""The buckets in use, with the state of compressors, which survives a change of buckets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import Compressor, Figures, commit_all, is_finite
from hvdtrain.compression.table import Compression
from hvdtrain.exchange.bucket_exchange import BucketExchange
from hvdtrain.exchange.buckets import Layout, assign_buckets
from hvdtrain.exchange.residuals import Residuals, is_residual, residual_key
from hvdtrain.plan.buckets import BucketPlan
from hvdtrain.spans import Spans


@dataclass(frozen=True)
class DetachedState:
    """State of compressors that belongs to no bucket: residuals, and what the compressors have learned."""

    tensors: Mapping[str, Tensor]  # by ``parameter/kind``
    ranks: int  # world size of the job in which all ranks hold this state

    def without_keys(self, keys: Collection[str]) -> DetachedState:
        """Return the state without these keys."""
        return DetachedState({key: t for key, t in self.tensors.items() if key not in keys}, self.ranks)

    def without_parameters(self, parameters: Collection[str], ranks: int, keep: Collection[str] = ()) -> DetachedState:
        """Return the state of other parameters and of the keys `keep`, for a world size of `ranks`.

        The sum of a residual over ranks stays the same.
        """
        scale = self.ranks / ranks
        rest = {k: t for k, t in self.tensors.items() if k in keep or k.rpartition("/")[0] not in parameters}
        scaled = {key: t * scale if is_residual(key) and scale != 1.0 else t for key, t in rest.items()}
        return DetachedState(scaled, ranks)

    def has_residual(self, parameter: str) -> bool:
        """Whether there is a residual of this parameter."""
        return residual_key(parameter) in self.tensors

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        for key, tensor in self.tensors.items():
            if is_residual(key):
                tensor.mul_(factor)


class ActiveBuckets(Residuals):
    """The buckets in use; none until their plan is known.

    Args:
        make: makes the exchange of a plan, by the first arguments of `BucketExchange`.

    Attributes:
        comm: the ranks that exchange them; `ranks` is their number.
        named: the parameters that are exchanged, with their names.
        exchange: the exchange of the buckets in use.
        detached: state of compressors that belongs to no bucket.
    """

    def __init__(
        self,
        comm: Comm,
        compression: Compression,
        make: Callable[..., BucketExchange],
        weight: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        self.comm, self.ranks = comm, comm.size
        self._compression, self._make, self._weight, self._factor = compression, make, weight, factor
        self.named: list[tuple[str, nn.Parameter]] = []
        self.exchange: BucketExchange | None = None
        self.detached = DetachedState({}, comm.size)
        self._delivered: list[str] = []
        self._figures: Figures | None = None

    def adopt(self, plan: BucketPlan) -> BucketExchange:
        """Make the buckets of a plan and give their compressors the state of their parameters.

        A compressor without error feedback cannot take over a residual: the next exchange adds it to the gradient.
        The old buckets are freed first, if nothing else holds them: gradients are views of them.
        """
        self.drop()
        named = dict(self.named)
        exchange = self.exchange = self._make(plan, named, self.comm, self._compression, self._weight, self._factor)
        for compressor in exchange.compressors:
            compressor.load_state_dict(self.detached.tensors, self.detached.ranks)
        lossless = [compressor for compressor in exchange.compressors if not compressor.keeps_error]
        names = [p.name for c in lossless for p in c.shape.parts if self.detached.has_residual(p.name)]
        self._delivered = [residual_key(name) for name in names]
        # State of other parameters stays: a frozen parameter may be freed again.
        self.detached = self.detached.without_parameters(named, self.ranks, keep=self._delivered)
        exchange.add_residuals({name: self.detached.tensors[residual_key(name)] for name in names})
        return exchange

    def drop(self) -> None:
        """Remove the buckets and keep the state of their compressors."""
        self.detached = self._state()
        self.exchange = self._figures = None

    def drop_all_but_residuals(self, ranks: int) -> None:
        """Remove the buckets and keep this rank's residuals, for a job of another world size.

        Other state of compressors must be equal on all ranks. A rank that joins has none, so it is dropped.
        """
        self.drop()
        residuals = {key: tensor for key, tensor in self.detached.tensors.items() if is_residual(key)}
        self.detached, self.ranks = DetachedState(residuals, ranks), ranks

    def finite(self) -> bool:
        """Whether the sums are finite, as far as compressors with state or loss check it. Equal on all ranks."""
        return all(map(is_finite, (self._figures or Figures(self._compressors())).read()))

    def commit(self, *, applied: bool) -> None:  # noqa: D102
        commit_all(self._compressors(), applied=applied, figures=self._figures)
        if applied and self._delivered and self.exchange is not None:
            self.detached = self.detached.without_keys(self._delivered)
            self._delivered = []
            self.exchange.add_residuals({})

    def rescale(self, factor: float) -> None:  # noqa: D102
        self.detached.rescale(factor)
        for compressor in self._compressors():
            compressor.rescale(factor)

    def synchronize_state(self) -> None:  # noqa: D102
        for compressor in self._compressors():
            compressor.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the tensors that `synchronize_state` would make, without changing the state. Collective: yes.

        They are valid until the next step.
        """
        attached = {k: t for compressor in self._compressors() for k, t in compressor.synchronized_state().items()}
        return {**self.detached.tensors, **attached}

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return all ranks."""
        return range(self.ranks)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors (not copied) and plain values; equal on all ranks after `synchronize_state`."""
        state = self._state()
        return dict(state.tensors), {"plan": self.exchange and asdict(self.exchange.plan), "ranks": state.ranks}

    def parameter_names(self) -> dict[str, list[str]]:
        """Return the names of each bucket's parameters, by the prefix of its collectives' names."""
        return self.exchange.parameter_names() if self.exchange else {}

    def layouts(self) -> list[Layout]:
        """Return the layouts of the dense buckets; empty in a step that learns the order."""
        return self.exchange.layouts if self.exchange else []

    def start_times_ns(self) -> list[int]:
        """Return when the exchange of each dense bucket last started."""
        return self.exchange.start_times_ns() if self.exchange else []

    def buffers(self) -> list[Tensor]:
        """Return the buffers of all buckets."""
        return self.exchange.buffers() if self.exchange else []

    def _state(self) -> DetachedState:
        if self.exchange is None:
            return self.detached
        attached = {k: t for compressor in self._compressors() for k, t in compressor.state_dict().items()}
        return DetachedState({**self.detached.tensors, **attached}, self.ranks)

    def _compressors(self) -> Sequence[Compressor]:
        return self.exchange.compressors if self.exchange else ()


class BetweenCopies(ActiveBuckets):
    """The exchange of what a rank holds with those ranks that hold the same.

    Args:
        named: parameters, in the order in which backward finishes them; equal on these ranks.
        comm: these ranks.
        bucket_bytes: size limit of a bucket.
        name: prefix of the collectives' names.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        comm: Comm,
        compression: Compression,
        bucket_bytes: int,
        spans: Spans,
        name: str,
    ) -> None:
        super().__init__(comm, compression, partial(BucketExchange, name=name, spans=spans, as_views=True))
        self.named = named
        self._plan = assign_buckets(named, bucket_bytes, [name for name, _ in named])
        self.adopt(self._plan)

    @property
    def _queue(self) -> BucketExchange:
        assert self.exchange is not None
        return self.exchange

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load the residuals of as many copies as the values say."""
        self.exchange, self.detached = None, DetachedState(tensors, int(values["ranks"]))
        self.adopt(self._plan)

    def begin(self) -> None:
        """Start a step."""
        self._figures = None
        self._queue.begin()

    def add_gradient(self, name: str) -> None:
        """Pack the gradient of a parameter, and start the exchange of its bucket if it is full."""
        self._queue.add_gradient(name)

    def finish(self) -> list[Tensor]:
        """Return the sums; they are gradients now. Collective: yes."""
        sums = self._queue.finish()
        self._figures = Figures(self._queue.compressors)
        return sums
