"""Numbers and names formatted for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from hvdtrain.errors import listed
from hvdtrain.observe.output import duration
from hvdtrain.timeline.analysis import analysis

_LEAST_LOST = 0.005
_MANY_RANKS = 4


def readable(text: str) -> str:
    """Replace what is not valid text, as in some file names, by question marks."""
    return text.encode("utf-8", "replace").decode()


def counted(number: int, noun: str) -> str:
    """Format a count as ``1 step`` or ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranks(numbers: Sequence[int], hosts: Mapping[int, str] | Sequence[str] = (), most: int = _MANY_RANKS) -> str:
    """Format ranks as ``rank 3 on a`` or ``ranks 4, 5 and 2 more on a, b``."""
    where = list(dict.fromkeys(hosts[rank] for rank in numbers if hosts[rank])) if hosts else []
    on = f" on {', '.join(where)}" if 0 < len(where) <= _MANY_RANKS else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers, most)}{on}"


def decimals(largest: float) -> int:
    """Return the number of decimals for a column with numbers up to `largest`."""
    return 0 if largest >= 10_000 else 1 if largest >= 100 else 2 if largest >= 1 else 3


def ms(value: float, places: int | None = None) -> str:
    """Format milliseconds, with three significant figures unless `places` is given."""
    if places is None:
        size = abs(round(value, 3))
        if size < 0.0005:
            return "0"
        places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{places}f}"


def elapsed(seconds: float) -> str:
    """Format a time since the beginning of a run."""
    for unit, length, least in (("days", 86400.0, 3.0), ("h", 3600.0, 2.0), ("min", 60.0, 2.0)):
        if seconds >= least * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def interval(estimate: analysis.Estimate, places: int | None = None) -> str:
    """Format an interval as ``[11.1 .. 13.4]``; empty if there is none, as for a single step."""
    if not (math.isfinite(estimate.low) and math.isfinite(estimate.high)) or estimate.low == estimate.high:
        return ""
    if places is None:
        size = abs(estimate.value) or max(abs(estimate.low), abs(estimate.high))
        places = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"[{estimate.low:,.{places}f} .. {estimate.high:,.{places}f}]"


def quantity(estimate: analysis.Estimate, places: int | None = None, unit: str = "") -> str:
    """Format milliseconds with their interval, if there is one."""
    return f"{ms(estimate.value, places)}{unit} {interval(estimate, places)}".rstrip()


def durations(seconds: analysis.Estimate) -> str:
    """Format a long time with its interval, as ``1:12:30 [1:06:00 .. 1:20:00]``."""
    return f"{duration(seconds.value)} [{duration(seconds.low)} .. {duration(seconds.high)}]"


def percent(share: float) -> str:
    """Format a share of 1 as a percentage; small ones are not rounded to 0."""
    value = 100 * share
    if 0 < value < 1:
        return "< 1%" if value < 0.5 else "1%"
    return f"{value:.0f}%"


def speed(gb_per_s: float) -> str:
    """Format a bandwidth as ``597 MB/s``, in powers of 1000."""
    return f"{nbytes(1e9 * gb_per_s)}/s"


def nbytes(count: float) -> str:
    """Format bytes as ``26.2 MB``, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{ms(count)} {unit}"
        count /= 1000
    return f"{ms(count)} TB"


def memory(found: analysis.Memory) -> str:
    """Format memory as ``30 MiB of the GPU at most: parameters 10, optimizer 20``, largest first, without zeros."""
    kinds = sorted(((mib, kind) for kind, mib in found.mib.items() if mib), reverse=True)
    parts = ", ".join(f"{kind} {mib:,.0f}" for mib, kind in kinds)
    return f"{sum(found.mib.values()):,.0f} MiB of the {found.where} at most: {parts}"


def outer(found: analysis.OuterSteps) -> str:
    """Describe outer steps."""
    return (
        f"{counted(found.count, 'outer step')}; in each {nbytes(found.sent_bytes)} sent, {ms(found.wait_ms)} ms waited;"
        f" cosine with the mean change {found.cosine:.2f}, drift {found.drift:.2f}"
    )


def efficiency(found: analysis.Efficiency) -> str:
    """Format shares of the peak as ``41% used (MFU); lost: kernels below the peak 30%, input 4%``, largest first."""
    parts = _lost(found.lost)
    return f"{percent(found.mfu)} used (MFU){f'; lost: {parts}' if parts else ''}"


def _lost(shares: Mapping[str, float], most: int | None = None) -> str:
    """List `most` shares that are not tiny, largest first."""
    ordered = sorted(shares.items(), key=lambda each: -each[1])
    return ", ".join(f"{name} {percent(share)}" for name, share in ordered[:most] if share >= _LEAST_LOST)


def slower(found: analysis.Change) -> str:
    """Format a stretch of slow steps as ``233 instead of 187 ms: batches have more tokens``."""
    with_it = f": {'; '.join(found.coincided)}" if found.coincided else ""
    return f"{ms(found.step_ms)} instead of {ms(found.usual_ms)} ms{with_it}"


def scaling(found: analysis.Scaling) -> str:
    """Say how well more ranks pay off."""
    return f"scaling: on {found.ranks} ranks a device trains at {found.efficiency:.0%} of its speed on {found.fewer}"


def goodput(found: analysis.Goodput, most: int | None = None) -> str:
    """Format goodput as ``93% of the device-hours; evaluations 4%, start-up 2%``, largest first; `most` of them.

    If steps that do not count have used energy, it is ``93% of the device-hours, 96% of the energy of steps``.
    """
    total = sum(found.hours.values())
    parts = _lost({use: hours / total for use, hours in found.hours.items() if use != analysis.USEFUL}, most)
    lost = found.energy is not None and found.energy < 1 - _LEAST_LOST
    energy = f", {percent(found.energy)} of the energy of steps" if found.energy is not None and lost else ""
    return f"{percent(found.share)} of the device-hours{energy}{f'; {parts}' if parts else ''}"


def spells(found: Sequence[analysis.Spell]) -> str:
    """Say when a rank was late, such as " since step 800"; nothing for one that always was."""
    if not found:
        return ""
    longest = max(found, key=lambda spell: spell.last_step - spell.first_step)
    steps = f"in steps {longest.first_step:,} to {longest.last_step:,}"
    if len(found) > 1:
        return f" in {len(found)} spells, the longest {steps}"
    return f" since step {longest.first_step:,}" if longest.lasts else f" {steps}"


def worst_straggler(blame: analysis.Blame) -> tuple[str, str, list[int]]:
    """Return the first straggler, a rank or a host, with what it costs and since when; and its ranks."""
    first = blame.late[0]
    rows = {row.rank: row for row in blame.ranks}
    for host, ranks in blame.slow_hosts().items():
        if first in ranks:
            return f"host {host}", f"{ms(sum(rows[rank].cost_ms.value for rank in ranks))} ms per step", ranks
    group = blame.late_groups()[0]
    cost = total(
        max([spell.cost_ms for spell in blame.spells_of(rank)], key=lambda each: each.value, default=rows[rank].cost_ms)
        for rank in group
    )
    found = quantity(cost, unit=" ms per step") + spells(blame.spells_of(first))
    return straggler(blame, first), found, group


def start_of(blame: analysis.Blame) -> str:
    """Name a start or round as ``steps 1 to 120, on 4 ranks``."""
    return f"steps {blame.first_step:,} to {blame.last_step:,}, on {counted(len(blame.ranks), 'rank')}"


def earlier_straggler(blame: analysis.Blame) -> str:
    """Name the first straggler of another start than the one shown."""
    name, cost, _ = worst_straggler(blame)
    return f"{name} was a straggler in {start_of(blame)}, and cost {cost}"


def total(estimates: Iterable[analysis.Estimate]) -> analysis.Estimate:
    """Add estimates, with the widest possible interval."""
    every = list(estimates)
    return analysis.Estimate(*(sum(getattr(each, end) for each in every) for end in ("value", "low", "high")))


def behind(late_ms: float) -> str:
    """Format how much later than others a rank is, less its waits for them: ``4.00 ms behind``, or ``ahead of``."""
    return f"{ms(abs(late_ms))} ms {'behind' if late_ms >= 0 else 'ahead of'}"


def straggler(blame: analysis.Blame, rank: int, *, on: bool = True) -> str:
    """Return the name of a straggler, such as ``rank 3 on a`` or ``one of ranks 2, 3 on a``; `on`: with its host."""
    group = blame.group_of(rank)
    name = ranks(group, {row.rank: row.host for row in blame.ranks} if on else ())
    return f"one of {name}" if len(group) > 1 else name
