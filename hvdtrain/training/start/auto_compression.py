"""`--parallel.compression auto`: steps without it, a look at the link and at what coding costs, a choice, and why."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json
from hvdtrain.engine.exchange import ExchangeEngine
from hvdtrain.exchange.choice import WORTH, Measured, Prediction, choose
from hvdtrain.exchange.trial import cost_s, link

CANDIDATES = ("fp16", "int8", "powersgd:4")
"""What `auto` looks at, that which loses least first."""
_FIRST, _COUNT = 3, 5
"""Steps that are measured: not the first, which learns the buckets, nor the second, the first to use them."""


class CompressionTrial:
    """Looks at steps, then decides for the engine.

    Args:
        engine: undecided.
        comm: the ranks.
        device: where gradients are.
        event: takes what the journal holds of it.
        say: takes a line for a person.
    """

    def __init__(
        self,
        engine: ExchangeEngine,
        comm: Comm,
        device: torch.device,
        event: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._comm = comm
        self._device = device
        self._event = event
        self._say = say
        self._seen = 0
        self._steps: list[tuple[float, float]] = []

    def saw(self, step: int, step_s: float, exposed_s: float) -> None:
        """Take a step's duration and the part of it that waited for gradients. Collective: yes."""
        if not self._engine.undecided:
            return
        self._seen += 1
        if self._seen >= _FIRST:
            self._steps.append((step_s, exposed_s))
        if len(self._steps) == _COUNT:
            self._decide(step)

    def _decide(self, step: int) -> None:
        measured = self._measure()
        chosen, predictions = choose(measured, [self._engine.meant(name) for name in CANDIDATES])
        # Of numbers that all ranks have in common, so that all choose alike.
        self._engine.decide(chosen)
        self._event(
            {
                "event": "compression_chosen",
                "at_step": step,
                "compression": chosen,
                "step_s": measured.step_s,
                "exposed_s": measured.exposed_s,
                "latency_s": measured.latency_s,
                "bytes_per_s": measured.bytes_per_s,
                "predicted_step_s": {p.compression: p.step_s for p in predictions},
                "cost_s": dict(measured.cost_s),
            }
        )
        self._say(_sentence(measured, chosen, predictions))

    def _measure(self) -> Measured:
        latency_s, bytes_per_s = link(self._comm, self._device)
        layouts = self._engine.layouts()
        costs: dict[str, float] = {}
        for name in ("none", *CANDIDATES):
            meant = self._engine.meant(name)
            costs[name] = sum(
                cost_s(meant, layout.shape, [p.grad for p in layout.parameters if p.grad is not None])
                for layout in layouts
            )
        mine = [median(s for s, _ in self._steps), median(e for _, e in self._steps), latency_s, bytes_per_s, costs]
        everyone = allgather_json(self._comm, mine, name="auto_compression")
        return Measured(
            step_s=max(other[0] for other in everyone),
            # The rank that waits least is the slowest: the others wait for it, which no compression mends.
            exposed_s=min(other[1] for other in everyone),
            latency_s=max(other[2] for other in everyone),
            bytes_per_s=min(other[3] for other in everyone),
            ranks=self._comm.size,
            buckets=[layout.shape.sizes for layout in layouts],
            cost_s={name: max(other[4][name] for other in everyone) for name in costs},
        )


def _sentence(measured: Measured, chosen: str, predictions: list[Prediction]) -> str:
    plain, *others = predictions
    table = ", ".join(f"{p.compression} {p.step_s * 1e3:.0f} ms" for p in others)
    found = (
        f"a step takes {measured.step_s * 1e3:.0f} ms, {measured.exposed_s * 1e3:.0f} of them waiting for gradients;"
        f" the link carries {measured.bytes_per_s * 8e-9:.2g} Gbit/s, so that they are {plain.wire_s * 1e3:.0f} ms on"
        f" their way; predicted with {table}"
    )
    if chosen == "none":
        return f"compression: none pays (less than {1 - WORTH:.0%} to win): {found}"
    return f"compression: {chosen} from here on: {found}"
