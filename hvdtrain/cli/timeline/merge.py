"""``hvdtrain timeline merge RUN -o all.json.gz``: merge the traces of all ranks."""

from __future__ import annotations

from hvdtrain.cli.parser import Parser, local
from hvdtrain.timeline import wording
from hvdtrain.timeline.merge import merge

_DESCRIPTION = "Merge the traces of all ranks and Horovod's Timeline into one for ui.perfetto.dev."


def main(command: str, argv: list[str]) -> int:
    """Write the trace and print a summary."""
    options = parser(command).parse_args(argv)
    merged = merge(options.sources, options.output)
    made = {"rank": len(merged.spans), "Horovod Timeline": len(merged.timelines)}
    content = ", ".join(wording.counted(number, noun) for noun, number in made.items() if number)
    lines = [f"{merged.path}: {merged.events} events of {content}, {merged.nbytes / (1 << 20):.1f} MiB"]
    error_us = max((spans.clock_error_us for spans in merged.spans), default=0.0)
    if len(merged.spans) > 1 and error_us < float("inf"):
        lines.append(f"the ranks' clocks agree to within {error_us:.1f} us")
    lines += [f"note: {note}" for note in merged.notes]
    lines.append('to view: https://ui.perfetto.dev, "Open trace file" (the file stays in your browser)')
    print(wording.readable("\n".join(lines)))
    return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    made = Parser(prog=f"hvdtrain timeline {command}", description=_DESCRIPTION)
    sources = "a run's folder, or Timelines of Horovod"
    made.add_argument("sources", type=local, nargs="+", metavar="RUN|FILE", help=sources)
    output = "file to write (gzip if it ends in .gz)"
    made.add_argument("-o", "--output", type=local, required=True, metavar="FILE", help=output)
    return made
