"""``hvdtrain timeline``: what traces say. Runs without torch and Horovod."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from hvdtrain.errors import HvdtrainError

COMMANDS = {
    "report": "where the time of a run, or of any Horovod Timeline, went; which rank is late; what to change",
    "merge": "one trace of all ranks, for ui.perfetto.dev and chrome://tracing",
    "diff": "what is different between two runs",
    "whatif": "how long a step would take with other ranks, links, buckets or compression",
    "start": "record a window of a job that is running",
    "stop": "end it",
}

_MODULES = {"start": "window", "stop": "window"}
"""Files that hold more than one command; the others are named after theirs."""


def main(argv: list[str]) -> int:
    """Run a command of this group; 0, 1 where a condition was met or an error came, 2 on a wrong option."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        lines = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
        sys.stdout.write(f"usage: hvdtrain timeline COMMAND [OPTIONS]\n\n{lines}\n\neach has --help\n")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        sys.stderr.write(f"hvdtrain: there is no command {name!r} of timeline; there are {', '.join(COMMANDS)}\n")
        return 2
    try:
        code: int = import_module(f"hvdtrain.cli.timeline.{_MODULES.get(name, name)}").main(name, rest)
        sys.stdout.flush()
    except HvdtrainError as error:
        sys.stderr.write(f"hvdtrain: {type(error).__name__}: {error}\n")
        return 1
    except BrokenPipeError:  # whoever reads, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
        return 128 + signal.SIGPIPE
    return code
