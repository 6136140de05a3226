"""Texts that name ranks and say where they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.observe.failure.statement import STALLED, RankProcess, Statement


def place(statement: Statement) -> str:
    """Return where a rank is: ``in wait at step 12 for 3.1 s, waiting for gradients/0``."""
    if statement.open_spans:
        name, seconds = statement.open_spans[-1]
        text = f"in {name} {at(statement.step)} for {seconds:.1f} s"
    else:
        text = at(statement.step) + (f", last in {statement.last_span}" if statement.last_span else "")
        text += f" for {statement.idle_s:.1f} s" if statement.is_waiting or statement.kind == STALLED else ""
    names = list(statement.in_flight)
    if names and statement.fault is None:
        verb = "waiting for" if statement.is_waiting else "with"
        text += f", {verb} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return text


def at(step: int) -> str:
    """Return ``at step 3``, or ``before the first step`` for 0."""
    return f"at step {step}" if step else "before the first step"


def grouped(statements: Iterable[Statement]) -> list[tuple[str, Statement]]:
    """Group ranks that are at the same place: the label of each group, and its longest idle statement."""
    groups: dict[tuple[Any, ...], list[Statement]] = {}
    for s in statements:
        error = s.fault.type if s.fault else ""
        inside = s.open_spans[-1][0] if s.open_spans else ""
        groups.setdefault((s.step, inside, tuple(s.in_flight), s.is_waiting, error), []).append(s)
    return [(labels(s.process for s in group), max(group, key=lambda s: s.idle_s)) for group in groups.values()]


def label(process: RankProcess) -> str:
    """Return ``rank 3 on host``."""
    return f"rank {process.rank} on {process.host}"


def labels(processes: Iterable[RankProcess]) -> str:
    """Return ``rank 3 on host`` for one rank, ``ranks 1-3, 5`` for several."""
    members = sorted(processes, key=lambda process: process.rank)
    if len(members) == 1:
        return label(members[0])
    hosts = {process.host for process in members}
    return f"ranks {ranges([process.rank for process in members])}" + (f" on {hosts.pop()}" if len(hosts) == 1 else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return ``1-3, 5`` for 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def agree(ranks: Sequence[object], singular: str, plural: str) -> str:
    """Return the word that agrees with the number of ranks."""
    return singular if len(ranks) == 1 else plural
