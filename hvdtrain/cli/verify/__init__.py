"""``hvdtrain verify``: what can be proven of a run."""

from __future__ import annotations

import sys
from importlib import import_module

from hvdtrain.errors import HvdtrainError

COMMANDS = {
    "data": "every sample of each epoch was taken exactly once, whatever was killed or resized",
    "resume": "a run that is interrupted equals one that is not, on its number of ranks and on others",
}


def main(argv: list[str]) -> int:
    """Run a command of this group; 0, 1 where it does not hold or an error came, 2 on a wrong option."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        lines = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
        sys.stdout.write(f"usage: hvdtrain verify COMMAND RUN [OPTIONS]\n\n{lines}\n\neach has --help\n")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        sys.stderr.write(f"hvdtrain: there is no command {name!r} of verify; there are {', '.join(COMMANDS)}\n")
        return 2
    try:
        code: int = import_module(f"hvdtrain.cli.verify.{name}").main(rest)
    except HvdtrainError as error:
        sys.stderr.write(f"hvdtrain: {type(error).__name__}: {error}\n")
        return 1
    return code
