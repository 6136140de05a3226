"""What a run used over all its starts: time of devices, energy, money. From its journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from hvdtrain.observe.past_journal import JournalStart

S_PER_HOUR = 3600.0
_J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Cost:
    """What a run used."""

    starts: int  # number of starts with a record of their ranks; rounds of an elastic job are starts, too
    device_hours: float  # time from the event `started` to the last line of each start, times its devices
    energy_kwh: Mapping[str, float]  # by kind, GPUs and CPUs: those that were measured in every start
    unmeasured: Mapping[str, str]  # why, by kind, of the others
    money: float | None  # None if no price is known for a start
    price_per_hour: float | None  # of one device, in the last start; None if unknown

    @property
    def all_kwh(self) -> float | None:
        """The energy of all kinds that were measured; None if none was."""
        return sum(self.energy_kwh.values()) if self.energy_kwh else None


def cost_of(starts: Sequence[JournalStart]) -> Cost | None:
    """Return the cost of a run from the starts in its journal; None if no start has a record of its ranks.

    The time between two rounds of an elastic job counts for the devices that both rounds have. Steps that were
    repeated have cost something as well, and count.
    """
    known = known_starts(starts)
    if not known:
        return None
    hours = [devices_of(start) * max(0.0, start.last_time - start.started["time"]) / S_PER_HOUR for start in known]
    hours = [own + gap for own, gap in zip(hours, hours_before(known), strict=True)]
    configs = [as_mapping(as_mapping(start.started.get("config")).get("observe")) for start in known]
    prices = [float(price) if _is_number(price := config.get("price_per_hour")) else None for config in configs]
    paid = [price * used for price, used in zip(prices, hours, strict=True) if price is not None]
    energy_kwh, unmeasured = _energy(known)
    money = sum(paid) if len(paid) == len(known) else None
    return Cost(len(known), sum(hours), energy_kwh, unmeasured, money, prices[-1])


def known_starts(starts: Sequence[JournalStart]) -> list[JournalStart]:
    """Return the starts with a record of their ranks."""
    return [s for s in starts if _is_number(s.started.get("size")) and _is_number(s.started.get("time"))]


def hours_before(known: Sequence[JournalStart]) -> list[float]:
    """Return the device-hours between each start and the one before it: 0 unless the job continued."""
    found = [0.0] * len(known)
    for number, (before, after) in enumerate(pairwise(known), 1):
        if after.started.get("goes_on"):
            gap_s = max(0.0, after.started["time"] - before.last_time)
            found[number] = min(devices_of(before), devices_of(after)) * gap_s / S_PER_HOUR
    return found


def text(cost: Cost) -> str:
    """Format a cost as one line, with the energy, or why it is unknown."""
    parts = [f"money {money(cost.money)}"] if cost.money is not None else []
    energy = f"energy not measured ({next(iter(cost.unmeasured.values()), 'no counters')})"
    if cost.all_kwh is not None:
        energy = f"{number(cost.all_kwh)} kWh ({' and '.join(cost.energy_kwh)})"
    return ", ".join([*parts, f"{number(cost.device_hours)} device-hours", energy])


def number(value: float) -> str:
    """Format a cost with three significant digits, never in powers of ten: ``0.0000123``, ``1,230``."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    places = 2
    while abs(value) < 10 ** (2 - places) and places < 9:
        places += 1
    return f"{value:,.{places}f}"


def money(value: float) -> str:
    """Format money with two decimals; small amounts with three significant digits."""
    return f"{value:,.2f}" if value == 0 or abs(value) >= 1 else number(value)


def devices_of(start: JournalStart) -> int:
    """Return the number of devices of a start."""
    found = start.started.get("devices")
    return int(found if _is_number(found) else start.started["size"])


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of a record; an empty one if it is anything else, as in a damaged journal."""
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _energy(starts: Sequence[JournalStart]) -> tuple[dict[str, float], dict[str, str]]:
    """Return kWh of the kinds that were measured in all starts, and the reasons for the others."""
    reasons: dict[str, str] = {}
    used: dict[str, float] = {}
    for start in starts:
        last = (start.events_named("energy") or [{}])[-1]
        for kind, reason in _reasons(start.started).items():
            failed = last.get("failed")
            if reason or (isinstance(failed, list) and kind in failed):
                reasons.setdefault(kind, reason or "a counter failed during the run")
            joules = as_mapping(last.get("joules")).get(kind)
            used[kind] = used.get(kind, 0.0) + (joules if _is_number(joules) else 0.0)
    if len(starts) > 1:
        missing = {kind for kind in used for start in starts if kind not in _reasons(start.started)}
        reasons |= dict.fromkeys(missing - reasons.keys(), "not in every start")
    return {kind: joules / _J_PER_KWH for kind, joules in used.items() if kind not in reasons}, reasons


def _reasons(started: Mapping[str, Any]) -> dict[str, str]:
    """Return why the energy of each kind is not measured in a start; empty texts if it is."""
    return {str(kind): str(reason) for kind, reason in as_mapping(started.get("energy")).items()}
