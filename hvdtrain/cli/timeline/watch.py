"""``hvdtrain timeline watch RUN``: what slows a run, while it runs."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime

from hvdtrain.cli.parser import Parser, above_0, local

_EVERY_S = 30.0
_MOST_BYTES = 1 << 25
_EPILOG = """\
examples:
  hvdtrain timeline watch runs/NAME
  hvdtrain timeline watch runs/NAME --every_s 300
  hvdtrain timeline watch runs/NAME --once --json

Prints the step time, then a line whenever something becomes slow or is fast
again. Ends with the run, or with Ctrl-C.
"""


def main(command: str, argv: list[str]) -> int:
    """Print verdicts until the run has ended; return the exit code."""
    options = parser(command).parse_args(argv)
    from hvdtrain.errors import TraceError
    from hvdtrain.observe.past_journal import is_finished
    from hvdtrain.run_layout import RunLayout
    from hvdtrain.timeline.analysis.analyse import analyse
    from hvdtrain.timeline.report.terminal import changed, summary_lines, verdicts
    from hvdtrain.timeline.run import load, run_folder
    from hvdtrain.timeline.run_files import RunFiles

    journal, before, began_s = RunLayout(options.run).journal, None, 0.0
    files = RunFiles(run_folder(options.run), grows=True)
    while True:
        is_over = is_finished(journal) if journal.is_file() else False
        try:
            analysis = analyse(load(options.run, most_bytes=_MOST_BYTES, files=files))
        except TraceError:
            if options.once or options.asked or is_over or not journal.is_file():
                raise
        else:  # it has begun
            found = verdicts(analysis)
            if options.json:
                step = analysis.over_time.moments[-1].last_step if analysis.over_time is not None else 0
                goodput = analysis.goodput.share if analysis.goodput is not None else None
                cpu_s, began_s = time.process_time() - began_s, time.process_time()
                look = {"version": 1, "step": step, "verdicts": found, "goodput": goodput, "cpu_s": cpu_s}
                print(json.dumps(look), flush=True)
            else:
                lines = summary_lines(analysis) if before is None else changed(before, found)
                stamp = "" if before is None else f"{datetime.now():%H:%M:%S} "
                print("\n".join(f"{stamp}{line}" for line in lines), end="\n" if lines else "", flush=True)
            before = found
        if options.once or is_over:
            return 0
        try:
            if not options.asked:
                time.sleep(options.every_s)
            elif not sys.stdin.readline():
                return 0
        except KeyboardInterrupt:
            return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    what = "Say what slows a run while it runs: stragglers, longer steps, communication, input."
    made = Parser(prog=f"hvdtrain timeline {command}", description=what, epilog=_EPILOG)
    made.add_argument("run", type=local, metavar="RUN", help="the run's folder, as the job printed it")
    every = "seconds between two looks (default: %(default)g)"
    made.add_argument("--every_s", type=lambda text: above_0(text, 1e6), default=_EVERY_S, metavar="S", help=every)
    made.add_argument("--asked", action="store_true", help="look once more at each line of the input, as runs do")
    made.add_argument("--once", action="store_true", help="look once")
    made.add_argument("--json", action="store_true", help="print a line of JSON for each look")
    return made
