"""What a job would take, before it is queued: from a run that measured its steps, evaluations and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hvdtrain.config.schema import Config, ParallelConfig
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.observe.cost import S_PER_HOUR, Cost, as_mapping, cost_of, money, number
from hvdtrain.observe.output import duration
from hvdtrain.observe.past_journal import read_journal_starts
from hvdtrain.observe.scalars import numbers
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.ending import LEAST_STEPS, Ending, Pace, best_every, due, ending, pace_of
from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence

_WAYS = ({"compression": "fp16"}, {"compression": "int8"}, {"compression": "powersgd:4"}, {"shard": "optimizer"},
         {"bucket_mib": 8.0}, {"bucket_mib": 64.0})  # fmt: skip
_SAME = {"train": ("micro_batch", "compile", "tf32", "deterministic"), "memory": ("offload", "checkpointing"),
         "optimizer": ("name",)}  # fmt: skip
"""Options that change how long a step takes, in a way that is not predicted."""
_WORTH, _MOST_WAYS = 0.97, 3
_S_PER_DAY = 86400.0


@dataclass(frozen=True)
class Asked:
    """The job: its options, ranks, hosts and link (None: as in the run), failures a day, and when it has to end."""

    config: Config
    ranks: int
    hosts: int | None = None
    failures_per_day: float = 0.0
    deadline_s: float | None = None
    bandwidth_gbit: float | None = None
    latency_us: float | None = None


def outlook(folder: Path, asked: Asked) -> list[tuple[str, str]]:
    """Return names and values: the step, the end, what it costs, and what would be faster; why that is unknown."""
    starts = read_journal_starts(RunLayout(folder).journal)
    pace = pace_of(starts)
    if pace is None:
        return [("step", f"unknown: {folder} has not trained {LEAST_STEPS} steps after its start-up")]
    cost, config = cost_of(starts), as_mapping(starts[-1].started.get("config"))
    found = [("measured", f"{folder}: {pace.steps} steps on {pace.ranks} rank(s)")]
    change = _change(config, asked, pace)
    if isinstance(change, str):
        return [*found, ("step", f"unknown: {change}")]
    evidence = None
    try:
        evidence = read_evidence(folder)
        at = _at(pace, evidence, change)
    except (ConfigError, DataError) as error:
        if change != Change():
            return [*found, ("step", ": ".join(filter(None, ("unknown", error.what, error.next_step))))]
        at = pace
    how = "as measured" if change == Change() else "predicted"
    found.append(("step", f"{wording.quantity(_in_ms(at.step_s), unit=' ms')}, {how}"))
    if asked.config.train.epochs is not None:
        why = "unknown: how many steps --train.epochs takes; use --train.epochs null --train.steps N"
        return [*found, ("end", why)]
    end = _ending(at, asked)
    if math.isinf(end.seconds.value):
        why = f"{asked.failures_per_day:g} failure(s) a day cost more time than there is"
        return [*found, ("end", f"step {_steps(asked)} is never reached: {why}"), _checkpoints(at, asked, end)]
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in end.parts.items() if seconds >= 0.5)
    found.append(("end", f"step {_steps(asked)} after {wording.durations(end.seconds)}{parts and ': '}{parts}"))
    if asked.deadline_s is not None:
        sure = end.probability(asked.deadline_s)
        found.append(("deadline", f"{duration(asked.deadline_s)} is kept with a probability of {sure:.0%}"))
    found.append(("cost", _cost(end, asked.ranks, cost)))
    found.append(("memory", _memory(starts[-1].events_named("memory"), change)))
    if asked.failures_per_day:
        found.append(_checkpoints(at, asked, end))
    if evidence is not None:
        found += _faster(evidence, pace, change, asked, end)
    return found


def _change(was: Mapping[str, Any], asked: Asked, pace: Pace) -> Change | str:
    """Return how the job differs from the run; a reason if it cannot be predicted from it."""
    config, train, parallel = asked.config, as_mapping(was.get("train")), as_mapping(was.get("parallel"))
    known = {"engine", "shard", "compression", "bucket_mib"}
    names = {"parallel": [field.name for field in fields(ParallelConfig) if field.name not in known], **_SAME}
    other = [
        f"--{section}.{name}"
        for section, each in names.items()
        for name in each
        if as_mapping(was.get(section)).get(name) != getattr(getattr(config, section), name)
    ]
    if was.get("precision") != config.precision:
        other.append("--precision")
    if other:
        return f"the run had another {other[0]}; record 50 steps with it"
    given: dict[str, Any] = {"bandwidth_gbit": asked.bandwidth_gbit, "latency_us": asked.latency_us}
    given |= {name: value for name in known if (value := getattr(config.parallel, name)) != parallel.get(name)}
    if config.train.global_batch != train.get("global_batch"):
        given["global_batch"] = config.train.global_batch
    if asked.ranks != pace.ranks:
        given["size"] = asked.ranks
    if asked.hosts is not None:
        given["ranks_per_host"] = -(-asked.ranks // asked.hosts)
    return Change(**given)


def _at(pace: Pace, evidence: Evidence, change: Change) -> Pace:
    """Return the pace after a change; steps take as much more as is predicted, and ranks share evaluations."""
    if change == Change():
        return pace
    found = predict(evidence, change)
    factor = found.then.step_s / found.now.step_s
    mean = factor * pace.step_s.value
    of_mean = (pace.step_s.high - pace.step_s.value) / pace.step_s.value
    low, high = (
        mean * (1 + sign * math.hypot(of_mean, abs(bound - found.then.step_s) / found.then.step_s))
        for sign, bound in ((-1, found.low_s), (1, found.high_s))
    )
    size = change.size or pace.ranks
    step_s = Estimate(mean, max(0.0, low), high)
    return replace(pace, ranks=size, step_s=step_s, evaluation_s=pace.evaluation_s * pace.ranks / size)


def _steps(asked: Asked) -> int:
    train = asked.config.train
    return min(train.steps, train.stop_at or train.steps)


def _checkpoints(pace: Pace, asked: Asked, end: Ending) -> tuple[str, str]:
    """Return how many steps between checkpoints cost least."""
    if not pace.save_s:
        return ("checkpoints", "unknown: the run has not saved one")
    best, now = best_every(pace, asked.failures_per_day / _S_PER_DAY), asked.config.checkpoint.every
    text = "one at the end costs"
    if best < _steps(asked):
        text = f"every {best:,} steps ({duration(best * pace.step_s.value)}) cost"
    saved_s = end.seconds.value - _ending(pace, asked, best).seconds.value
    sooner = f": the job ends {duration(max(0.0, saved_s))} sooner than with {now}" if math.isfinite(saved_s) else ""
    return ("checkpoints", f"{text} least with {asked.failures_per_day:g} failure(s) a day{sooner}")


def _ending(pace: Pace, asked: Asked, save_every: int | None = None) -> Ending:
    train, every, steps = asked.config.train, asked.config.checkpoint.every, _steps(asked)
    evaluations, rate = 1 + due(0, steps, train.eval_every or every), asked.failures_per_day / _S_PER_DAY
    return ending(pace, steps, evaluations, due(0, steps, save_every or every), failures_per_s=rate)


def _in_ms(seconds: Estimate) -> Estimate:
    return Estimate(*(1e3 * each for each in (seconds.value, seconds.low, seconds.high)))


def _cost(end: Ending, ranks: int, cost: Cost | None) -> str:
    low, value, high = (ranks * each / S_PER_HOUR for each in (end.seconds.low, end.seconds.value, end.seconds.high))
    text = f"{number(value)} device-hours [{number(low)} .. {number(high)}]"
    if cost is None or not cost.device_hours:
        return text
    if cost.all_kwh is not None:
        text += f", {number(cost.all_kwh / cost.device_hours * value)} kWh"
    return text if cost.price_per_hour is None else f"{text}, money {money(cost.price_per_hour * value)}"


def _memory(events: Sequence[Mapping[str, Any]], change: Change) -> str:
    known = numbers(as_mapping(events[-1].get("mib"))).values() if events else ()
    if not known or (change.engine, change.shard, change.compression, change.global_batch) != (None,) * 4:
        return "unknown here; hvdtrain fit predicts it"
    same = "" if change.size is None else " with another number of ranks; hvdtrain fit predicts it"
    return f"{sum(known):,.0f} MiB a rank at most (of the {events[-1].get('where')}), as measured{same}"


def _faster(evidence: Evidence, pace: Pace, change: Change, asked: Asked, end: Ending) -> list[tuple[str, str]]:
    """Return the changes that end the job clearly sooner, the best first."""
    found = []
    for way in _WAYS:
        try:
            at = _at(pace, evidence, replace(change, **way))
        except ConfigError:
            continue
        sooner = _ending(at, asked)
        if sooner.seconds.value < _WORTH * end.seconds.value:
            (name, value), *_ = way.items()
            step, saved = wording.quantity(_in_ms(at.step_s), unit=" ms"), end.seconds.value - sooner.seconds.value
            found.append((-saved, f"--parallel.{name} {value}: a step of {step}; ends {duration(saved)} sooner"))
    return [("faster", text) for _, text in sorted(found)[:_MOST_WAYS]] or [("faster", "none of the changes")]
