"""``hvdtrain cache``: list what the cache holds, and remove what is old."""

from __future__ import annotations

import argparse
import time

from hvdtrain.cli.parser import Parser
from hvdtrain.errors import HvdtrainError
from hvdtrain.runtime.environment import environ

_DESCRIPTION = """\
List tokenized texts, converted models and wheels of Horovod in
~/.cache/hvdtrain. All of it is made again when it is needed."""
_EPILOG = """\
examples:
  hvdtrain cache
  hvdtrain cache --prune 30
"""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain cache", description=_DESCRIPTION, epilog=_EPILOG)
    days = "remove what no job has begun to use for DAYS days; more than the longest job takes"
    made.add_argument("--prune", type=_days, metavar="DAYS", help=days)
    return made


def main(argv: list[str]) -> int:
    """List the cache, or prune it; return 0. Errors: HvdtrainError: a folder cannot be removed."""
    options = parser().parse_args(argv)
    from hvdtrain.install.cache import cache_entries, prune

    entries, what = cache_entries(environ()), "in the cache"
    if options.prune is not None:
        try:
            entries, what = prune(entries, options.prune), "removed"
        except OSError as error:
            raise HvdtrainError(f"cannot remove {error.filename}: {error.strerror}") from error
    for entry in entries:
        days = (time.time() - entry.used_s) / 86_400
        print(f"{entry.size_bytes / 2**20:9.1f} MiB  {days:6.1f} days  {entry.about:<20}  {entry.path}")
    print(f"{len(entries)} folder(s) with {sum(e.size_bytes for e in entries) / 2**20:,.1f} MiB {what}")
    return 0


def _days(text: str) -> float:
    if not (value := float(text)) >= 0:
        raise argparse.ArgumentTypeError("expected a number of days, 0 or more")
    return value
