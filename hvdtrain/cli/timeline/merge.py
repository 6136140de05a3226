"""``hvdtrain timeline merge RUN -o all.json.gz``: one trace of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cli.parser import Parser
from hvdtrain.timeline import wording
from hvdtrain.timeline.merge import Merged, merge

_WHAT = "One trace of all ranks, with Horovod's Timeline and torch.profiler where recorded, for ui.perfetto.dev."


def main(command: str, argv: list[str]) -> int:
    """Write it, and say what it holds."""
    options = parser(command).parse_args(argv)
    print(wording.readable(_told(merge(options.sources, options.output))))
    return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    made = Parser(prog=f"hvdtrain timeline {command}", description=_WHAT)
    made.add_argument(
        "sources", type=Path, nargs="+", metavar="RUN|FILE", help="a run's folder, or Timelines of Horovod"
    )
    made.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="to write, gzip'd if *.gz")
    return made


def _told(merged: Merged) -> str:
    parts = (
        _count(merged.ranks, "rank", "ranks"),
        _count(merged.timelines, "Timeline of Horovod", "Timelines of Horovod"),
        _count(merged.profiles, "profile of torch", "profiles of torch"),
    )
    held = ", ".join(part for part in parts if part)
    lines = [f"{merged.path}: {merged.events} events of {held}, {merged.nbytes / (1 << 20):.1f} MiB"]
    if len(merged.ranks) > 1 and merged.clock_error_us < float("inf"):
        lines.append(f"clocks of the ranks: within {merged.clock_error_us:.1f} us of rank 0's")
    lines += [f"note: {note}" for note in merged.notes]
    return "\n".join([*lines, 'open it: https://ui.perfetto.dev, "Open trace file" (it stays in your browser)'])


def _count(things: Sequence[object], one: str, more: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else more}" if things else ""
