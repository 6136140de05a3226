"""A group of commands, such as ``hvdtrain timeline``: which of them is meant, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping

from hvdtrain.errors import HvdtrainError


def run(
    group: str, operands: str, commands: Mapping[str, str], argv: list[str], call: Callable[[str, list[str]], int]
) -> int:
    """Run a command of a group; its exit code, 1 where an error came, 2 where there is no such command.

    130 where it was interrupted, 141 where nobody reads on.

    Args:
        group: its name.
        operands: what the usage shows behind the command.
        commands: what each does, by name.
        argv: the command and its arguments.
        call: runs the command of a name.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        lines = "\n".join(f"  {name:<8} {text}" for name, text in commands.items())
        sys.stdout.write(f"usage: hvdtrain {group} COMMAND {operands}\n\n{lines}\n\neach has --help\n")
        return 0
    name, *rest = argv
    if name not in commands:
        sys.stderr.write(f"hvdtrain: there is no command {name!r} of {group}; there are {', '.join(commands)}\n")
        return 2
    try:
        code = call(name, rest)
        sys.stdout.flush()
    except HvdtrainError as error:
        sys.stderr.write(f"hvdtrain: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("hvdtrain: interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever reads, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 128 + signal.SIGPIPE
    return code
