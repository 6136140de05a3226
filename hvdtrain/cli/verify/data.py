"""``hvdtrain verify data``: every sample exactly once."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.cli.parser import Parser

_EPILOG = """\
examples:
  hvdtrain verify data runs/20250301-101500-language_model

exit code: 0 where all that can be looked at holds, 1 where something is wrong, which is named.
"""


def main(argv: list[str]) -> int:
    """Read the ledger, check it, print; the exit code."""
    options = parser().parse_args(argv)

    from hvdtrain.verify.data import verify_data
    from hvdtrain.verify.data_text import to_text

    report = verify_data(options.run)
    print(to_text(report, options.run))
    return 1 if report.wrong else 0


def parser() -> Parser:
    """Declare the options."""
    made = Parser(
        prog="hvdtrain verify data",
        description="Proves from a run's ledger that every sample of each epoch was taken exactly once, over kills,"
        " resumes and other numbers of ranks. The run may be going on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    return made
