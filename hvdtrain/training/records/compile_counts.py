"""How often torch.compile compiled, and where it could not compile a function as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COMPILED = "compiled"
"""Event at the end: `frames` compiled, `graph_breaks`, and `late` frames, after the first step. The first ones of
`break_reasons`, `break_places` (where a compiled function resumes after a break) and `late_reasons`."""
_RESUMED = "torch_dynamo_resume_in_"
"""Start of the names that torch gives to the rest of a function after a graph break."""
_MOST = 3
"""Reasons of each kind that are recorded."""


class CompileCounts:
    """Counts of this process from now on, by torch's own counters.

    Args:
        event: records the event `COMPILED`.
        say: shows a line.
    """

    def __init__(self, event: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> None:
        import torch._dynamo.utils as counted  # takes seconds

        self._counted, self._event, self._say = counted, event, say
        self._breaks_before = dict(counted.counters["graph_break"])
        self._frames_before = self._late_after = self._frames()

    def end_first_step(self) -> None:
        """Count what is compiled from now on as late: each batch should find its code."""
        self._late_after = self._frames()

    def end(self) -> None:
        """Record the counts, and show them."""
        before = self._breaks_before
        breaks = {text: n - before.get(text, 0) for text, n in self._counted.counters["graph_break"].items()}
        breaks = {text: number for text, number in breaks.items() if number > 0}
        late = self._frames() - self._late_after
        facts: dict[str, Any] = {
            "event": COMPILED,
            "frames": self._frames() - self._frames_before,
            "graph_breaks": sum(breaks.values()),
            "late": late,
            "break_reasons": [_first_line(text) for text in breaks][:_MOST],
            "break_places": self._break_places(),
            "late_reasons": self._late_reasons(late),
        }
        self._event(facts)
        parts = [f"torch.compile: {facts['graph_breaks']} graph break(s), {late} compilation(s) after step 1"]
        for kind in ("break_reasons", "break_places", "late_reasons"):
            parts += facts[kind][:1]
        self._say("; ".join(parts))

    def _frames(self) -> int:
        return int(self._counted.counters["frames"]["total"])

    def _newest(self, count: int) -> list[Any]:
        """Return torch's records of the newest `count` compilations, or as many as it keeps."""
        frames = [each for each in self._counted.get_compilation_metrics() if each.co_name]  # others are of backward
        return frames[-count:] if count else []

    def _break_places(self) -> list[str]:
        newest = self._newest(self._frames() - self._frames_before)
        found = [_place(each) for each in newest if str(each.co_name).startswith(_RESUMED)]
        return list(dict.fromkeys(found))[:_MOST]

    def _late_reasons(self, late: int) -> list[str]:
        """Return why what was there did not fit, and where."""
        reasons = [(each, getattr(each, "recompile_reason", None)) for each in self._newest(late)]
        found = [f"{_place(each)}: {_first_line(reason)}" for each, reason in reasons if reason]
        return list(dict.fromkeys(found))[:_MOST]


def _place(metrics: Any) -> str:
    return f"{str(metrics.co_name).removeprefix(_RESUMED)} ({metrics.co_filename}:{metrics.co_firstlineno})"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
