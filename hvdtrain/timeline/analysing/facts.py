"""What findings are made of. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.timeline.analysing.blame import Verdict
from hvdtrain.timeline.analysing.communication import item_bytes
from hvdtrain.timeline.analysis import Blame, Budget, Communication, Part
from hvdtrain.timeline.columns import RunTrace


@dataclass(frozen=True)
class Facts:
    """What findings are made of."""

    run: RunTrace
    budget: Budget | None
    communication: Communication | None
    blame: Blame
    verdict: Verdict | None

    @property
    def step_ms(self) -> float:
        """Wall time of a step."""
        return self.budget.step_ms.value if self.budget else 0.0

    def part(self, name: str) -> Part | None:
        """A part of the budget."""
        return next((part for part in self.budget.parts if part.name == name), None) if self.budget else None

    def option(self, section: str, name: str) -> Any:
        """An option of the run; None where it is not known."""
        values = self.run.config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    def bucket_mib(self, factor: float) -> str:
        """A size of buckets so many times that of the run: of its largest, where nobody has asked for one."""
        size = self.option("parallel", "bucket_mib")
        if not isinstance(size, (int, float)) or size <= 0:
            buckets = [bucket for spans in self.run.spans for bucket in spans.buckets.values()]
            size = max((bucket.length * item_bytes(bucket.dtype) for bucket in buckets), default=32 << 20) / (1 << 20)
        nearest = 2.0 ** round(math.log2(size * factor))
        return f"{max(0.25, min(256.0, nearest)):g}"
