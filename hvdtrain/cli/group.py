"""A group of commands such as ``hvdtrain timeline``: choose the command, run it, handle its errors."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping

from hvdtrain.errors import HvdtrainError


def run(
    group: str, operands: str, commands: Mapping[str, str], argv: list[str], call: Callable[[str, list[str]], int]
) -> int:
    """Run a command of a group and return its exit code.

    The code is 1 after an error, 2 for an unknown command, 130 after an interrupt, 141 if the reader of stdout closed
    it. `operands`: what the usage shows after the command; `commands`: descriptions by name; `call`: runs a command.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        wrapped = [textwrap.wrap(f"{name:<8} {text}", 77) for name, text in commands.items()]
        lines = "\n".join("  " + ("\n" + " " * 11).join(each) for each in wrapped)
        sys.stdout.write(f"usage: hvdtrain {group} COMMAND {operands}\n\n{lines}\n\n")
        sys.stdout.write(f"hvdtrain {group} COMMAND --help lists the options of a command.\n")
        return 0
    name, *rest = argv
    if name not in commands:
        sys.stderr.write(f"hvdtrain: there is no command {name!r} of {group}; the commands are {', '.join(commands)}\n")
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
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's flush at exit
        return 128 + signal.SIGPIPE
    return code
