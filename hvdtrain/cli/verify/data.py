"""``hvdtrain verify data``: check that every sample was used exactly once."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.cli.parser import Parser

_EPILOG = """\
examples:
  hvdtrain verify data runs/20250301-101500-language_model

exit code: 0 if everything that can be checked is correct, 1 otherwise
"""


def main(argv: list[str]) -> int:
    """Read and check the ledger, print the result, and return the exit code."""
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
        description="Check from a run's ledger that every sample of each epoch was used exactly\nonce, over kills,"
        " resumes and changed numbers of ranks. The run may still be\ntraining.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, metavar="RUN", help="run folder")
    return made
