"""How ranks and the places they are at are called. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.observe.failure.statement import STALLED, Statement, Who


def place(statement: Statement) -> str:
    """Where a rank is: ``in wait at step 12 for 3.1 s, waiting for gradients/0``."""
    if statement.open:
        name, seconds = statement.open[-1]
        text = f"in {name} {at(statement.step)} for {seconds:.1f} s"
    else:
        text = at(statement.step) + (f", last in {statement.last}" if statement.last else "")
        text += f" for {statement.idle_s:.1f} s" if statement.waits or statement.kind == STALLED else ""
    names = list(statement.in_flight)
    if names and statement.fault is None:
        verb = "waiting for" if statement.waits else "with"
        text += f", {verb} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return text


def at(step: int) -> str:
    """``at step 3``, or before the first."""
    return f"at step {step}" if step else "before the first step"


def grouped(statements: Iterable[Statement]) -> list[tuple[str, Statement]]:
    """Statements of ranks at one place taken together: who they are, and the one that is there longest."""
    groups: dict[tuple[Any, ...], list[Statement]] = {}
    for s in statements:
        error = s.fault.type if s.fault else ""
        inside = s.open[-1][0] if s.open else ""
        groups.setdefault((s.step, inside, tuple(s.in_flight), s.waits, error), []).append(s)
    return [(labels(s.who for s in group), max(group, key=lambda s: s.idle_s)) for group in groups.values()]


def label(who: Who) -> str:
    """``rank 3 on host``."""
    return f"rank {who.rank} on {who.host}"


def labels(whos: Iterable[Who]) -> str:
    """``rank 3 on host``, ``ranks 1-3, 5``."""
    members = sorted(whos, key=lambda who: who.rank)
    if len(members) == 1:
        return label(members[0])
    hosts = {who.host for who in members}
    return f"ranks {ranges([who.rank for who in members])}" + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def ranges(numbers: Sequence[int]) -> str:
    """``1-3, 5`` of 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def agree(ranks: Sequence[object], one: str, several: str) -> str:
    """The word that goes with one rank, or with several."""
    return one if len(ranks) == 1 else several
