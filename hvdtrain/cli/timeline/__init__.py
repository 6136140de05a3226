"""``hvdtrain timeline``: what traces say. Runs without torch and Horovod."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import import_module
from types import ModuleType

from hvdtrain.cli.group import run

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


def parser(name: str) -> ArgumentParser:
    """Declare the options of a command of this group."""
    made: ArgumentParser = _module(name).parser(name)
    return made


def main(argv: list[str]) -> int:
    """Run a command of this group; 0, 1 where a condition was met or an error came, 2 on a wrong option."""

    def call(name: str, rest: list[str]) -> int:
        code: int = _module(name).main(name, rest)
        return code

    return run("timeline", "[OPTIONS]", COMMANDS, argv, call)


def _module(name: str) -> ModuleType:
    return import_module(f"hvdtrain.cli.timeline.{_MODULES.get(name, name)}")
