"""``hvdtrain verify resume``: interrupted equals uninterrupted."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hvdtrain.cli.parser import Parser

if TYPE_CHECKING:
    from hvdtrain.verify.equality import Compared

_EPILOG = """\
examples:
  hvdtrain verify resume runs/20250301-101500-language_model
  hvdtrain verify resume runs/NAME --steps 50 --sizes 1,2,4

It trains the run's config anew, in a scratch folder, for twice N steps at a time; the run itself is only read. On one
number of ranks losses, parameters and optimizer state have to be the same bit for bit, across two to a tolerance.

exit code: 0 where this holds, 1 where it does not: the first step or tensor that differs is named; 130 on Ctrl-C.
"""


def main(argv: list[str]) -> int:
    """Train, compare, print; the exit code."""
    options = parser().parse_args(argv)

    from hvdtrain.verify.resume import verify_resume
    from hvdtrain.verify.runs import read_config

    config = read_config(options.run)  # first: where there is no run, nothing is made
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-verify-"))
    try:
        with _ended_by(signal.SIGTERM, signal.SIGHUP):
            compared = list(verify_resume(config, folder, options.steps, options.sizes, _say))
    except (KeyboardInterrupt, SystemExit):  # after an error the output of the job stays there
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print("\n" + _table(compared))
    wrong = [found for found in compared if found.first is not None]
    for found in wrong:
        print(f"WRONG: {found.what}: {found.first}")
    if wrong:
        print(f"the runs are in {folder}")
        return 1
    shutil.rmtree(folder)
    print("the law holds")
    return 0


def parser() -> Parser:
    """Declare the options."""
    made = Parser(
        prog="hvdtrain verify resume",
        description="Proves that a run that is interrupted and goes on equals one that is not interrupted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", type=Path, metavar="RUN", help="a run's folder: its config is what is trained")
    made.add_argument("--steps", type=_positive, default=10, metavar="N", help="optimizer steps of each half (10)")
    made.add_argument("--sizes", type=_sizes, default=[1, 2], metavar="A,B", help="numbers of ranks (1,2)")
    return made


@contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """Signals that end this process end what it has started too, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, flush=True)


def _table(compared: list[Compared]) -> str:
    width = max(len(found.what) for found in compared)
    lines = [f"{'compared':<{width}}  {'how':<9}{'losses':>7}  {'at most':<9}{'tensors':>8}  {'at most':<9}  result"]
    for found in compared:
        how, result = "bits" if found.exact else "tolerance", "equal" if found.first is None else "WRONG"
        numbers = f"{found.steps:>7}  {found.loss:<9.2g}{found.tensors:>8}  {found.tensor:<9.2g}"
        lines.append(f"{found.what:<{width}}  {how:<9}{numbers}  {result}")
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _sizes(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}: give numbers of ranks such as 1,2") from None
