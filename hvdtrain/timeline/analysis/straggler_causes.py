"""Causes of a straggler: parts of its steps, its CPU, its GPU, its experts, compared with other ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdtrain.spans import NESTED
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Cause
from hvdtrain.timeline.analysis.lateness import tamed
from hvdtrain.timeline.analysis.rank_steps import Rounds, exchanges, follows, waits_us
from hvdtrain.timeline.analysis.stragglers import Stragglers
from hvdtrain.timeline.columns import Floats, Ints, StepTable

_LEAST_MS = 0.05
_LEAST_SHARE = 0.1
_CLOCK_SHARE = 0.97
_HOTTER_C = 5.0
_MORE_TOKENS = 1.1
_EXPLAINS = 0.5
_WORDS = {
    "data": "it waits {mine} ms per step for data, others {others} ms",
    "copy": "it copies batches for {mine} ms per step, others for {others} ms",
    "forward": "forward takes {mine} ms per step, others {others} ms",
    "backward": "backward takes {mine} ms per step, others {others} ms",
    "optimizer": "clipping and the optimizer take {mine} ms per step, others {others} ms",
    "between steps": "it spends {mine} ms between steps, others {others} ms",
    "sums": "it receives the sums {mine} ms after the first rank, others {others} ms: its link",
    "rest": "it spends {mine} ms per step outside the named parts, others {others} ms",
    "gc": "Python's garbage collector takes {mine} ms per step of these, others {others} ms",
    "cpu": "it waited for a CPU core for {mine} ms per step, others {others} ms",
    "stopped": "its process was stopped for {mine} ms per step, others' for {others} ms",
    "steal": "another virtual machine used its host's cores for {mine} ms per step, others' for {others} ms",
}
_PARTS = ("data", "copy", "forward", "backward", "optimizer", "between steps", "sums", "rest")
_CPU_FACTS = {"cpu": "cpu_wait_us", "steal": "steal_us", "stopped": "stopped_us"}


def lateness_parts(table: StepTable, rounds: Rounds, *, steady: bool) -> dict[str, Floats]:
    """Return the parts of a step without its waits, ms [ranks], means over steps. `steady` ignores outliers of rounds.

    What lies between a step and one before it without stamps is unknown, and left out.
    """
    of_all, within = waits_us(table)
    measured = {part: np.nan_to_num(us) for part, us in table.parts_us.items() if part not in ("wait", "aside", "gc")}
    rest = table.end_us - table.start_us - of_all - within - sum(measured.values())
    parts = {part: us for part, us in measured.items() if part not in NESTED and part != "clip"}
    parts["optimizer"] = parts["optimizer"] + measured.get("clip", 0.0)
    chained, before = follows(table.step), np.arange(len(table.step)) - 1
    sums = table.released_us[:, before] - table.released_us[:, before].min(axis=0)
    gap = np.maximum(0.0, table.start_us - table.end_us[:, before] - np.nan_to_num(table.parts_us["aside"]))
    parts |= {"rest": rest, "sums": np.where(chained & exchanges(table)[before], sums, 0.0)}
    parts["between steps"] = np.where(chained, gap, 0.0)
    return {part: _average(rounds.mean_of(us), steady) for part, us in parts.items()}


def causes_of(rank: int, table: StepTable, stragglers: Stragglers) -> list[Cause]:
    """Return how a straggler differs from the median of the other ranks; largest difference first.

    Stops of its process, and collections of garbage, come before the parts of the step in which they were, if they
    explain most of them. If the rank is late in most steps, events in single steps are no cause.
    """
    own = stragglers.late_in(rank)
    rounds, column, late, steady = own.rounds, own.rounds.column, own.late, rank in own.steady
    others = [other for other in range(len(table.hosts)) if other not in late and other != rank]
    if not others:
        return []
    spent = lateness_parts(table, rounds, steady=steady)
    more = {name: values[rank] - np.median(values[others]) for name, values in spent.items()}
    least = max(_LEAST_MS, _LEAST_SHARE * max(more.values()))
    # Times that overlap the parts:
    gc = _average(rounds.mean_of(np.nan_to_num(table.parts_us["gc"])), steady)
    spent |= {"gc": gc, **_processor_times(table, column)}
    found = []
    for name, values in spent.items():
        mine, usual = float(values[rank]), max(0.0, float(np.median(values[others])))  # clipped outliers may leave less
        if mine - usual >= least:
            text = _WORDS[name].format(mine=wording.ms(mine), others=wording.ms(usual))
            found.append(Cause(name, mine - usual, text))
    most = max((cause.ms or 0.0 for cause in found), default=0.0)

    def order(cause: Cause) -> tuple[bool, float]:
        ms = cause.ms or 0.0
        return not (cause.name in ("stopped", "gc") and ms >= _EXPLAINS * most), -ms

    return [*sorted(found, key=order), *_other_causes(rank, others, table, column)]


def dominant(causes: Sequence[Cause]) -> list[Cause]:
    """Return the causes from which follows what to do: parts that explain most of a lateness, and what slows parts."""
    most = max((cause.ms or 0.0 for cause in causes), default=0.0)
    return [each for each in causes if each.name not in _PARTS or (each.ms or 0.0) >= _EXPLAINS * most]


def _average(us: Floats, steady: bool) -> Floats:
    return np.asarray((tamed(us) if steady else us).mean(axis=1) / 1e3)


def _processor_times(table: StepTable, column: Ints) -> dict[str, Floats]:
    """Return the times that keep ranks from a core, ms per step [ranks]; NaN where unknown."""
    found = {}
    for name, fact in _CPU_FACTS.items():
        blocks = [number for number in np.unique(table.block[column]) if table.facts[number].get(fact)]
        if (total := figures_of(table, column, fact, np.nansum)) is not None:
            found[name] = total / 1e3 / int(np.isin(table.block, blocks).sum())
    return found


def _other_causes(rank: int, others: Sequence[int], table: StepTable, column: Ints) -> Iterator[Cause]:
    """Yield the causes that are not times: the state of the GPU, and unbalanced experts."""

    def compared(fact: str) -> tuple[float, float]:
        """Return the mean of a fact on the rank, and the median over the others; NaN if unknown."""
        values = figures_of(table, column, fact, np.nanmean)
        if values is None or np.isnan(values[others]).all():  # such as those of idle ranks
            return math.nan, math.nan
        return values[rank], float(np.nanmedian(values[others]))

    mine, usual = compared("gpu_clock_mhz")
    if mine < _CLOCK_SHARE * usual:
        yield Cause("gpu clock", None, f"its GPU runs at {mine:.0f} MHz, others' at {usual:.0f} MHz")
    mine, usual = compared("gpu_temperature_c")
    if mine > usual + _HOTTER_C:
        yield Cause("gpu temperature", None, f"its GPU is at {mine:.0f} °C, others' at {usual:.0f} °C")
    known = [values for facts in _blocks(table, column) if (values := facts.get("gpu_throttle"))]
    words = {each: {word for why in _slowed(known, each) for word in why.split(", ")} for each in (rank, *others)}
    alone = {word for word in words[rank] if 2 * sum(word in words[other] for other in others) < len(others)}
    if alone:
        why = sorted(why for why in _slowed(known, rank) if alone & set(why.split(", ")))
        yield Cause("gpu throttle", None, f"its GPU throttled: {', '.join(why)}")
    mine, usual = compared("expert_share")
    if mine > _MORE_TOKENS * usual:
        yield Cause("experts", None, f"its busiest expert gets {mine:.0%} of the tokens, others' {usual:.0%}")


def _slowed(blocks: Sequence[Sequence[Any]], rank: int) -> set[str]:
    """Return the reasons for a lower clock of a rank's GPU."""
    values = [row[rank] for row in blocks if row[rank] and row[rank] == row[rank]]  # no NaN
    return {value if isinstance(value, str) else f"NVML's reasons {int(value):#x}" for value in values}


def _blocks(table: StepTable, column: Ints) -> list[Mapping[str, Sequence[Any]]]:
    return [table.facts[number] for number in np.unique(table.block[column])]


def figures_of(table: StepTable, column: Ints, name: str, how: Any) -> Floats | None:
    """Return a figure of each rank over its blocks; None if no rank has it."""
    rows = [facts[name] for facts in _blocks(table, column) if facts.get(name)]
    numbers = np.array([[np.nan if v is None else float(v) for v in row] for row in rows], float)
    if not numbers.size or np.isnan(numbers).all():
        return None
    known = ~np.isnan(numbers).all(axis=0)
    found = np.full(numbers.shape[1], np.nan)
    found[known] = how(numbers[:, known], axis=0)
    return found
