"""The inputs of findings. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvdtrain.compression.sizes import ITEM_BYTES
from hvdtrain.config.sync import AUTO_SYNC, EVERY_STEP
from hvdtrain.errors import ConfigError
from hvdtrain.observe.cost import as_mapping
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Blame, Budget, Change, Communication, Part, StartUp
from hvdtrain.timeline.analysis.batch_sizes import BatchSizes
from hvdtrain.timeline.analysis.shares import Division
from hvdtrain.timeline.analysis.stragglers import Stragglers
from hvdtrain.timeline.columns import RunTrace
from hvdtrain.timeline.whatif.evidence import Change as Setting
from hvdtrain.timeline.whatif.evidence import Evidence
from hvdtrain.timeline.whatif.predict import predict

_CPU_SHARE = 0.05
"""Share of a step."""
_MOST = 0.5
_WORTH_SHARE = 0.01
"""Of a step: advice that gains less is not given."""
_LEAST_MIB, _USUAL_MIB, _MOST_MIB = 0.25, 32.0, 256.0


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
    sizes: BatchSizes | None = None
    division: Division | None = None

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

    def part(self, name: str) -> Part | None:
        """Return a part of the budget."""
        return next((part for part in self.budget.parts if part.name == name), None) if self.budget else None

    def option(self, section: str, name: str) -> Any:
        """Return an option of the run; None if unknown."""
        return as_mapping(self.run.config.get(section)).get(name)

    def per_step(self, ms: float) -> str:
        """Format a cost with its share of the step."""
        return f"{wording.ms(ms)} ms per step ({ms / self.step_ms:.0%})"

    def core_wait_ms(self) -> float | None:
        """Return the median wait for a CPU core per step; None if small or unknown.

        It is a step at most: the measured wait includes what precedes the first step, such as an evaluation.
        """
        table = self.run.steps
        if table is None or not self.step_ms:
            return None
        waits = {
            number: row
            for number in np.unique(table.block)
            if (row := table.facts[number].get("cpu_wait_us")) and None not in row
        }
        if not waits:
            return None
        waited = np.sum(np.array([*waits.values()], float), axis=0) / 1e3 / int(np.isin(table.block, [*waits]).sum())
        usual = float(np.median(waited))
        return min(usual, self.step_ms) if usual >= _CPU_SHARE * self.step_ms else None

    def cores_explain(self, cost_ms: float) -> bool:
        """Return whether waiting for cores may be at least half of a cost."""
        return (self.core_wait_ms() or 0.0) >= _MOST * cost_ms

    def for_cores(self) -> str:
        """Return advice for ranks that wait for CPU cores: often the job's own ranks need more than there are."""
        host = as_mapping(as_mapping(self.run.machine).get("busiest_host"))
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
        return not self.has_other_engine() and self.option("parallel", "sync") in (None, EVERY_STEP, AUTO_SYNC)

    def bucket_mib(self, factor: float) -> float | None:
        """Return the option for buckets `factor` times as large; None if it would change nothing.

        The current size is that of the largest bucket, or the option if that is smaller.
        """
        if self.option("parallel", "engine") == "fsdp" and not self.option("parallel", "dp_shard"):  # it has none
            return None
        count = max((len(spans.buckets) for spans in self.run.spans), default=0)
        if factor > 1 and count == 1:
            return None
        buckets = [bucket for spans in self.run.spans for bucket in spans.buckets.values()]
        size = max((bucket.length * ITEM_BYTES.get(bucket.dtype, 4) for bucket in buckets), default=0) / (1 << 20)
        asked = self.option("parallel", "bucket_mib")
        if isinstance(asked, (int, float)) and asked > 0:
            size = min(size or math.inf, asked)
        size = size or _USUAL_MIB
        nearest = max(_LEAST_MIB, min(_MOST_MIB, 2.0 ** round(math.log2(size * factor))))
        return nearest if (nearest - size) * (factor - 1) > 0 else None
