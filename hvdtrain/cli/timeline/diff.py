"""``hvdtrain timeline diff``: compare two runs."""

from __future__ import annotations

import sys
from dataclasses import asdict

from hvdtrain.cli.parser import Parser, local

_EPILOG = """\
examples:
  hvdtrain timeline diff runs/before runs/after
  hvdtrain timeline diff before.json after.json   two Timelines of Horovod
  hvdtrain timeline diff runs/before runs/after --json
"""


def main(command: str, argv: list[str]) -> int:
    """Compare two runs and print the result; return the exit code."""
    options = parser(command).parse_args(argv)
    from hvdtrain.compare.step_times import compare, to_text
    from hvdtrain.timeline.analysis.analyse import analyse
    from hvdtrain.timeline.report.form import dumped
    from hvdtrain.timeline.run import load

    a, b = load(options.run_a), load(options.run_b)
    found = compare(analyse(a), analyse(b), a.config, b.config)
    if options.json:
        sys.stdout.write(dumped({"version": 1, **asdict(found)}).decode())
    else:
        print(to_text(found))
    return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    what = "Compare step times and options of two runs; mark significant differences."
    made = Parser(prog=f"hvdtrain timeline {command}", description=what, epilog=_EPILOG)
    made.add_argument("run_a", type=local, metavar="RUN_A", help="a run's folder, or Horovod's Timeline")
    made.add_argument("run_b", type=local, metavar="RUN_B", help="another run or Timeline")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made
