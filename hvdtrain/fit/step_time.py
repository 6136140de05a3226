"""The time of a step of a job that does not run, predicted from a short run of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.config.parse import RunConfig
from hvdtrain.config.schema import ParallelConfig
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import plan_of
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.whatif.evidence import Change, Evidence, changed_job
from hvdtrain.timeline.whatif.predict import Prediction, predict
from hvdtrain.timeline.whatif.probing import CodingProbe
from hvdtrain.timeline.whatif.read_run import read_evidence

_OF_A_PASS = {"train": ("micro_batch", "compile", "deterministic", "tf32"), "optimizer": ("name",)}
"""Options of sections that affect the time of a pass or of the update; the others do not."""
_PREDICTED = ("parallel", "loader", "checkpoint", "elastic", "observe", "run_dir", "resume", "log_level", "seed")
"""What the prediction covers, or what does not affect the time of a step."""


@dataclass(frozen=True)
class StepTimes:
    """Predicts steps of jobs that compute what a run has computed."""

    path: Path
    evidence: Evidence
    config: Mapping[str, Any]  # the run's resolved options
    bandwidth_gbit: float | None  # of each host's link, if a job has several hosts (default: measured in the run)
    ranks_per_host: int | None  # (default: as in the run)

    @staticmethod
    def of_run(path: Path, bandwidth_gbit: float | None, ranks_per_host: int | None) -> StepTimes:
        """Read a run. Errors: DataError if it lacks a measurement; ConfigError."""
        return StepTimes(path, read_evidence(path), RunLayout(path).read_config(), bandwidth_gbit, ranks_per_host)

    def predict(self, run: RunConfig, ranks: int) -> Prediction:
        """Return the step of a job of `ranks`.

        Errors: ConfigError: the job computes something else than the run, or has options that cannot be predicted.
        """
        if other := sorted(_computing(run.resolved).items() ^ _computing(self.config).items()):
            name = other[0][0]
            given, measured = (_computing(each).get(name, "its default") for each in (run.resolved, self.config))
            raise ConfigError(
                f"the step's time cannot be predicted from {self.path}: --{name} differs",
                expected=str(measured),
                found=str(given),
                next_step="record a run of 15 steps with these options, on any number of ranks",
            )
        parallel, dimensions = run.config.parallel, plan_of(run.config).dimensions
        measured = self.config["parallel"]
        for name, value in {**vars(dimensions), "dp_shard": parallel.dp_shard}.items():
            if value != measured.get(name, getattr(ParallelConfig, name)):
                raise ConfigError(
                    f"{self.path} does not predict a step with --parallel.{name} {value}",
                    expected=f"as in the run: {measured.get(name, getattr(ParallelConfig, name))}",
                    next_step="record a run of 15 steps with this option, and name it, too: --run RUN; or compare such"
                    " runs: hvdtrain compare",
                )
        change = Change(
            size=ranks,
            ranks_per_host=self.ranks_per_host,
            compression=parallel.compression,
            bucket_mib=parallel.bucket_mib,
            global_batch=run.config.train.global_batch,
            shard=parallel.shard,
            engine=parallel.engine,
        )
        if changed_job(self.evidence, change).ranks.hosts > 1:
            change = replace(change, bandwidth_gbit=self.bandwidth_gbit)
        return predict(self.evidence, change, CodingProbe(self.path))


def _computing(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that affect the time of a pass or of the update, by name."""
    found = {}
    for section, values in config.items():
        if section in _PREDICTED:
            continue
        if not isinstance(values, Mapping):
            found[section] = str(values)
            continue
        names = _OF_A_PASS.get(section, tuple(values))
        found |= {f"{section}.{name}": str(values[name]) for name in names if name in values}
    return found
