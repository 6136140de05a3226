"""The outer exchange: the changes of workers become a step of an outer optimizer on the parameters that they share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm, Handle
from hvdtrain.compression.outer import OuterCoding
from hvdtrain.config.sync import OuterPlan
from hvdtrain.data.order import Workers
from hvdtrain.errors import NonFiniteError

_CHUNK_BYTES = 4 << 20
"""Bytes of one collective, so that those of other communicators come in between."""
_SMALLEST = 1e-30


@dataclass(frozen=True)
class Links:
    """The communicators of a rank."""

    everyone: Comm  # all ranks
    group: Comm  # the ranks that serve the same worker
    leaders: Comm | None  # the first ranks of groups; None on the others
    workers: Workers  # of the run

    @property
    def served(self) -> range:
        """The workers that this rank serves."""
        return self.workers.served_by(self.everyone.rank)


@dataclass
class OuterFacts:
    """Figures of an outer step."""

    step: int  # after which it began
    fragment: int  # its number
    sent_bytes: int = 0  # by this rank
    wait_s: float = 0.0  # seconds in which this rank waited for others
    mean_norm: float = 0.0  # L2 norm of the mean change
    norms: list[Tensor] = field(default_factory=list)  # of the change of each served worker
    cosines: list[Tensor] = field(default_factory=list)  # between that change and the mean of all


@dataclass
class _Flight:
    """An exchange that is running."""

    facts: OuterFacts
    weights: Sequence[float]
    changes: list[Tensor]
    total: Tensor
    handles: list[Handle]


class OuterExchange:
    """Exchanges fragments of the parameters, and updates what all workers share.

    The outer optimizer is SGD with Nesterov momentum m (Sutskever et al., 2013) on the mean change g of the workers,
    weighted by their tokens::

        v = m v + g
        shared = shared - lr (g + m v)

    With a coding, each leader gathers the payloads of all workers and sums them in the order of workers, so that the
    result does not depend on the number of ranks. A worker adds what its coding has lost to its next change.

    Args:
        shared: parameters of the last outer step; updated in place.
        fragments: indices of the parameters of each fragment.
        coding: of payloads; None to sum changes in fp32.

    Attributes:
        momentum: of each fragment, flat, fp32; empty without momentum.
        residuals: what the coding has lost, by worker and fragment.
        pending: mean changes that were exchanged and not applied yet, by fragment.
        facts: figures of what was received; the caller takes them.
    """

    def __init__(
        self,
        plan: OuterPlan,
        links: Links,
        shared: list[Tensor],
        fragments: list[list[int]],
        coding: OuterCoding | None,
    ) -> None:
        self._plan, self._links, self._shared, self._coding = plan, links, shared, coding
        self.fragments = fragments
        lengths = [sum(shared[index].numel() for index in indices) for indices in fragments]
        device = shared[0].device if shared else torch.device("cpu")
        self._zeros: Callable[[int], Tensor] = lambda fragment: torch.zeros(lengths[fragment], device=device)
        every = range(len(fragments))
        self.momentum = [self._zeros(number) for number in every] if plan.momentum else []
        encodes = links.served if coding is not None and links.leaders is not None else ()
        self.residuals = {(worker, number): self._zeros(number) for worker in encodes for number in every}
        self.pending: dict[int, Tensor] = {}
        self.facts: list[OuterFacts] = []
        self._flights: dict[int, _Flight] = {}

    def start(
        self, step: int, fragment: int, parameters: Mapping[int, Sequence[Tensor]], weights: Sequence[float]
    ) -> None:
        """Begin the exchange of a fragment after a step. Collective: yes.

        Args:
            step: its number.
            fragment: its number.
            parameters: those of each served worker.
            weights: of all workers; their sum is 1.
        """
        flight = _Flight(OuterFacts(step, fragment), weights, [], self._zeros(fragment), [])
        self._flights[fragment] = flight
        leaders = self._links.leaders
        if leaders is None:
            return
        for worker in self._links.served:
            change = self._flat(fragment, self._shared) - self._flat(fragment, parameters[worker])
            flight.changes.append(change)
            flight.facts.norms.append(change.norm())
        if self._coding is None:
            for worker, change in zip(self._links.served, flight.changes, strict=True):
                flight.total.add_(change, alpha=weights[worker])
            for number, chunk in enumerate(torch.split(flight.total, _CHUNK_BYTES // 4)):
                flight.handles.append(leaders.allreduce(chunk, name=f"outer/{fragment}/{number}"))
            share = 2 * (leaders.size - 1) / leaders.size
            flight.facts.sent_bytes = round(share * flight.total.nbytes)
            return
        payloads = self._encode(fragment, flight.changes)
        for number, chunk in enumerate(torch.split(payloads, _CHUNK_BYTES, dim=1)):
            flight.handles.append(leaders.allgather(chunk.contiguous(), name=f"outer/{fragment}/{number}"))
        flight.facts.sent_bytes = payloads.nbytes * (leaders.size - 1)

    def _encode(self, fragment: int, changes: Sequence[Tensor]) -> Tensor:
        """Return the payloads of changes and residuals, (workers, bytes); keep new residuals."""
        assert self._coding is not None
        nbytes = self._coding.payload_bytes(len(changes[0]))
        payloads = torch.empty(len(changes), nbytes, dtype=torch.uint8, device=changes[0].device)
        for worker, change, payload in zip(self._links.served, changes, payloads, strict=True):
            residual = self.residuals[worker, fragment]
            residual.mul_(self._plan.feedback).add_(change)
            self._coding.encode(residual, payload)
            self._coding.add(payload, residual, -1.0)
        return payloads

    def receive(self) -> None:
        """Wait for what is running; it is pending then. Collective: yes, in the group."""
        for fragment in list(self._flights):
            flight = self._flights[fragment]
            began_s = time.perf_counter()
            received = [handle.wait() for handle in flight.handles]
            flight.facts.wait_s = time.perf_counter() - began_s
            mean = flight.total
            if self._coding is not None and received:
                for worker, payload in enumerate(torch.cat(received, dim=1)):
                    self._coding.add(payload, mean, flight.weights[worker])
            if self._links.group.size > 1:
                self._links.group.broadcast(mean, name=f"outer/{fragment}/mean").wait()
            norm = mean.norm()
            flight.facts.mean_norm = float(norm)
            if not math.isfinite(flight.facts.mean_norm):
                raise NonFiniteError(
                    "the mean change of the workers is not finite",
                    expected="finite parameters on all workers",
                    next_step="lower --optimizer.lr or --outer.lr, or use --parallel.sync every_step",
                    everywhere=True,
                )
            for change, own in zip(flight.changes, flight.facts.norms, strict=True):
                flight.facts.cosines.append((change @ mean) / (own * norm).clamp(min=_SMALLEST))
            self.pending[fragment] = mean
            del self._flights[fragment]
            self.facts.append(flight.facts)

    def apply(self, fragment: int, parameters: Mapping[int, Sequence[Tensor]]) -> None:
        """Update the shared parameters by a pending change; mix them into those of each served worker."""
        update, plan = self.pending.pop(fragment), self._plan
        if self.momentum:
            velocity = self.momentum[fragment].mul_(plan.momentum).add_(update)
            update = update.add_(velocity, alpha=plan.momentum)
        start = 0
        for index in self.fragments[fragment]:
            shared = self._shared[index]
            part = update[start : start + shared.numel()].view(shared.shape)
            start += shared.numel()
            shared.sub_(part.to(shared.dtype), alpha=plan.lr)
            for own in parameters.values():
                if plan.mix:
                    own[index].lerp_(shared, 1 - plan.mix)
                else:
                    own[index].copy_(shared)

    def _flat(self, fragment: int, parameters: Sequence[Tensor]) -> Tensor:
        return torch.cat([parameters[index].reshape(-1).float() for index in self.fragments[fragment]])


def divide(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide parameters of these sizes into fragments of about equal size; return the indices of each. Pure.

    Neighbours are in different fragments: each fragment has parameters from all depths of the model.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for index, size in enumerate(sizes):
        least = min(range(count), key=lambda number: totals[number])
        found[least].append(index)
        totals[least] += size
    return found
