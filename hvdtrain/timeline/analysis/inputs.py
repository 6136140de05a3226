"""The inputs of findings. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hvdtrain.config.sync import EVERY_STEP
from hvdtrain.errors import ConfigError
from hvdtrain.observe.cost import as_mapping
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Blame, Budget, Change, Communication, StartUp
from hvdtrain.timeline.analysis.budget import sample_of
from hvdtrain.timeline.analysis.stragglers import Stragglers
from hvdtrain.timeline.columns import RunTrace
from hvdtrain.timeline.whatif.evidence import Change as Setting
from hvdtrain.timeline.whatif.evidence import Evidence
from hvdtrain.timeline.whatif.predict import predict

LEAST_SHARE, LEAST_MS = 0.02, 0.2
"""Share of a step and milliseconds: smaller costs are not reported."""
_CPU_SHARE = 0.05
"""Share of a step."""
_MOST = 0.5
_WORTH_SHARE = 0.01
"""Of a step: advice that gains less is not given."""


@dataclass(frozen=True)
class Facts:
    """Everything that the rules for findings use."""

    run: RunTrace
    budget: Budget | None
    communication: Communication | None
    blame: Blame
    stragglers: Stragglers | None
    start_up: StartUp | None = None
    changes: Sequence[Change] = ()
    stalls: Mapping[int, float] = field(default_factory=dict)  # by how much longer each stalled step took, ms

    def confirmed(self, advice: str, change: Setting, most_ms: float = math.inf) -> str:
        """Return advice with the gain that a what-if predicts, `most_ms` at most; empty if it predicts none.

        The advice stays as it is if the run lacks what a prediction needs.
        """
        if (evidence := self.evidence) is None:
            return advice
        try:
            found = predict(evidence, change)
        except ConfigError:
            return advice
        more_samples = found.job.global_batch / evidence.job.global_batch
        gain_s = found.now.step_s - found.then.step_s / more_samples
        if gain_s < _WORTH_SHARE * found.now.step_s:
            return ""
        if change.global_batch is not None:
            return f"{advice} (predicted: {gain_s / found.now.step_s:.0%} less time per sample)"
        return f"{advice} (predicted: {wording.ms(min(1e3 * gain_s, most_ms))} ms less per step)"

    @cached_property
    def evidence(self) -> Evidence | None:
        """What predictions need; None if the run lacks it."""
        return self.run.evidence()

    @property
    def step_ms(self) -> float:
        """Wall time of a step."""
        return self.budget.step_ms.value if self.budget else 0.0

    def ms(self, *names: str) -> float:
        """Return the time of parts of the budget."""
        return sum(part.ms.value for part in self.budget.parts if part.name in names) if self.budget else 0.0

    def share(self, name: str) -> float:
        """Return the share of a part of the budget."""
        return sum(part.share for part in self.budget.parts if part.name == name) if self.budget else 0.0

    def option(self, section: str, name: str) -> Any:
        """Return an option of the run; None if unknown."""
        return as_mapping(self.run.config.get(section)).get(name)

    def per_step(self, ms: float) -> str:
        """Format a cost with its share of the step."""
        return f"{wording.ms(ms)} ms per step ({ms / self.step_ms:.0%})"

    def core_wait_ms(self) -> float | None:
        """Return the median wait for a CPU core per step of the budget, a step at most; None if small or unknown.

        Blocks with steps that are not in the budget, such as those of the start-up, count only if there are no others.
        """
        table = self.run.steps
        if table is None or not self.step_ms:
            return None
        rows = {number: table.facts[number].get("cpu_wait_us") for number in np.unique(table.block)}
        waits = {number: row for number, row in rows.items() if row and None not in row}
        if not waits:
            return None
        in_budget = np.isin(np.arange(len(table.step)), sample_of(table, self.stalls).columns)
        known = [number for number in waits if in_budget[table.block == number].all()] or [*waits]
        waited = np.sum([waits[number] for number in known], axis=0) / 1e3 / int(np.isin(table.block, known).sum())
        usual = float(np.median(waited))
        return min(usual, self.step_ms) if usual >= _CPU_SHARE * self.step_ms else None

    def cores_explain(self, cost_ms: float) -> bool:
        """Return whether waiting for cores may be at least half of a cost."""
        return (self.core_wait_ms() or 0.0) >= _MOST * cost_ms

    def for_cores(self) -> str:
        """Return advice for ranks that wait for CPU cores: often the job's own ranks need more than there are."""
        host = as_mapping(as_mapping(self.run.start.started.get("machine")).get("busiest_host"))
        counts: list[Any] = [host.get(name) for name in ("cores", "ranks", "threads")]
        cores, ranks, threads = counts if all(isinstance(count, int) for count in counts) else (0, 0, 0)  # unknown
        less = ["start fewer ranks"] * (ranks != 1) + ["reduce OMP_NUM_THREADS"] * (threads != 1)
        advice = ", or ".join(["stop other programs there", *less])
        if ranks * threads > cores:
            own = wording.counted(ranks * threads, "thread")
            advice = f"this job itself runs {own} on {wording.counted(cores, 'core')}: {', or '.join(less)}"
        return f"{advice}, --loader.workers 0" if self.option("loader", "workers") else advice

    def has_other_engine(self) -> bool:
        """Return whether the run has an engine that is not the default one, or ranks that divide the model."""
        engine, shard = (self.option("parallel", name) for name in ("engine", "shard"))
        is_divided = any(self.option("parallel", name) not in (None, 1) for name in ("tp", "ep", "cp", "pp"))
        return is_divided or (engine or "horovod", shard or "none") != ("horovod", "none")

    def may_train_apart(self) -> bool:
        """Return whether the run exchanges in each step, by an engine that supports workers which train apart."""
        return not self.has_other_engine() and self.option("parallel", "sync") in (None, EVERY_STEP)
