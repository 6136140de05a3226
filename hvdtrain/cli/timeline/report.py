"""``hvdtrain timeline report``: step time by part, stragglers, findings."""

from __future__ import annotations

import sys

from hvdtrain.cli.parser import Parser, local
from hvdtrain.errors import ConfigError, TraceError
from hvdtrain.files import write_text

_EPILOG = """\
examples:
  hvdtrain timeline report runs/NAME
  hvdtrain timeline report timeline.json             of any Horovod program
  hvdtrain timeline report part-1.json part-2.json   segments of one job
  hvdtrain timeline report runs/NAME --html report.html
  hvdtrain timeline report runs/NAME --log job.out   with its lines of NCCL
  hvdtrain timeline report runs/NAME \\
      --fail_if 'straggler_ms > 5 and exposed_share > 0.2'

exit code: 0 on success; 1 if the --fail_if condition is met, or if a file
cannot be read or written; 2 on a wrong option or condition, such as a figure
that this run lacks. Without a straggler, a condition on straggler_rank is
false.
"""


def main(command: str, argv: list[str]) -> int:
    """Print or write the report; return the exit code."""
    options = parser(command).parse_args(argv)
    from hvdtrain.timeline import wording
    from hvdtrain.timeline.analysis.analyse import analyse
    from hvdtrain.timeline.analysis.analysis import figures
    from hvdtrain.timeline.report import condition
    from hvdtrain.timeline.report.form import to_bytes
    from hvdtrain.timeline.report.page import to_html
    from hvdtrain.timeline.report.terminal import to_text
    from hvdtrain.timeline.run import load

    clauses: list[condition.Clause] = []
    try:
        if options.fail_if is not None:
            clauses = condition.parse(options.fail_if)
        analysis = analyse(load(*options.path, logs=options.log))
        met = clauses if clauses and condition.holds(clauses, figures(analysis)) else None
    except ConfigError as error:
        sys.stderr.write(f"hvdtrain: ConfigError: {error}\n")
        return 2
    if options.html is not None:
        try:
            write_text(options.html, to_html(analysis))
        except (OSError, ValueError) as error:  # ValueError: a path without a name, such as / or .
            raise TraceError(
                f"the page {options.html} cannot be written",
                expected="a file in an existing folder with write permission",
                found="a folder" if options.html.is_dir() else getattr(error, "strerror", None) or str(error),
                next_step="name another file: --html FILE",
            ) from None
    if options.json:
        sys.stdout.write(to_bytes(analysis).decode())
    else:
        print(wording.readable(to_text(analysis)))
        if options.html is not None:
            print(wording.readable(f"written: {options.html}"))
    if met is None:
        return 0
    sys.stderr.write(f"hvdtrain: --fail_if is met: {condition.met_text(met, figures(analysis))}\n")
    return 1


def parser(command: str) -> Parser:
    """Declare the options."""
    what = "Explain a run or any Horovod Timeline: step time by part, stragglers, findings."
    made = Parser(prog=f"hvdtrain timeline {command}", description=what, epilog=_EPILOG)
    add = made.add_argument
    add("path", nargs="+", type=local, metavar="PATH", help="a run's folder, or Horovod's Timeline")
    add("--json", action="store_true", help="print JSON (schema: python -m hvdtrain.timeline.report.form)")
    add("--html", type=local, metavar="FILE", help="write a self-contained page")
    log = "output of the job, to explain Horovod's and NCCL's lines in it"
    add("--log", type=local, metavar="FILE", action="append", default=[], help=log)
    condition = "exit with code 1 if this is true: NAME OP NUMBER [and ...]. --json shows the names, as figures"
    add("--fail_if", metavar="CONDITION", help=condition)
    return made
