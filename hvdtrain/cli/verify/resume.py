"""``hvdtrain verify resume``: interrupted equals uninterrupted."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.verify.equality import Compared

_EPILOG = """\
examples:
  hvdtrain verify resume runs/20250301-101500-language_model
  hvdtrain verify resume runs/NAME --steps 50 --sizes 1,2,4

It trains the run's config anew, in a scratch folder, for twice N steps at a time; the run itself is only read. On one
number of ranks losses, parameters and optimizer state have to be the same bit for bit, across two to a tolerance.

exit code: 0 where this holds, 1 where it does not: the first step or tensor that differs is named.
"""


def main(argv: list[str]) -> int:
    """Train, compare, print; the exit code."""
    parser = argparse.ArgumentParser(
        prog="hvdtrain verify resume",
        description="Proves that a run that is interrupted and goes on equals one that is not interrupted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder: its config is what is trained")
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="optimizer steps of each half (10)")
    parser.add_argument("--sizes", type=_sizes, default=[1, 2], metavar="A,B", help="numbers of ranks (1,2)")
    options = parser.parse_args(argv)

    from hvdtrain.verify.resume import verify_resume

    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-verify-"))
    compared = []
    for found in verify_resume(options.run, folder, options.steps, options.sizes, _say):
        compared.append(found)
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
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _sizes(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]
