"""``hvdtrain compare``: compare runs, and what each cost."""

from __future__ import annotations

import sys

from hvdtrain.cli.parser import Parser, local

_DESCRIPTION = "Compare the losses, step times, options and costs of runs with those of the first."
_EPILOG = """\
examples:
  hvdtrain compare runs/a runs/b
  hvdtrain compare runs/a-seed* runs/b-seed*         several seeds of each
  hvdtrain compare runs/main runs/new --fail_if 'loss > 1.01 * base'
  hvdtrain compare before.json after.json            two Timelines of Horovod

Losses are compared at the largest number of samples, and of seconds, that all
runs have. Runs that differ only in their seed form one column.

exit code: 0 on success; 1 if the --fail_if condition is true for a run, or on
an error; 2 on a wrong option or condition, or if runs have nothing in common.
"""


def main(argv: list[str]) -> int:
    """Print the comparison; return the exit code."""
    options = parser().parse_args(argv)
    from hvdtrain.compare.comparison import compare
    from hvdtrain.compare.read import read_run
    from hvdtrain.compare.step_times import compare_timelines, with_step_times
    from hvdtrain.compare.view import met, to_bytes, to_text
    from hvdtrain.timeline.wording import readable

    paths = [options.run_a, *options.run_b]
    are_files = all(path.is_file() for path in paths)
    comparison = compare_timelines(paths) if are_files else with_step_times(compare([*map(read_run, paths)]))
    found = met(options.fail_if, comparison) if options.fail_if is not None else []
    sys.stdout.write(to_bytes(comparison).decode() if options.json else f"{readable(to_text(comparison))}\n")
    if found:
        sys.stderr.write(f"hvdtrain: --fail_if is met: {'; '.join(found)}\n")
    return 1 if found else 0


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain compare", description=_DESCRIPTION, epilog=_EPILOG)
    add = made.add_argument
    add("run_a", type=local, metavar="RUN_A", help="folder of the run, or Timeline, to compare with (the base)")
    add("run_b", type=local, nargs="+", metavar="RUN_B", help="folders of other runs, or Timelines")
    add("--json", action="store_true", help="print JSON")
    condition = "exit with code 1 if this is true for a run: NAME OP NUMBER, or NAME OP NUMBER * base [and ...]. --json"
    add("--fail_if", metavar="CONDITION", help=f"{condition} shows the names, as figures")
    return made
