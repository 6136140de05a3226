"""``hvdtrain timeline``: analyse traces. Needs neither torch nor Horovod."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import import_module
from types import ModuleType

from hvdtrain.cli.parser import run_group

COMMANDS = {
    "report": "explain a run or any Horovod Timeline: step time by part, stragglers, findings",
    "merge": "merge the traces of all ranks, for ui.perfetto.dev and chrome://tracing",
    "hosts": "name the hosts and GPUs that slowed jobs, over all starts of runs",
    "watch": "say what slows a run while it runs",
    "whatif": "predict the step time with other ranks, links, buckets or compression",
}


def parser(name: str) -> ArgumentParser:
    """Declare the options of a command of this group."""
    made: ArgumentParser = _module(name).parser(name)
    return made


def main(argv: list[str]) -> int:
    """Run a command of this group. Return 0; 1 if a condition is met or on an error; 2 on a wrong option."""
    return run_group("timeline", "[OPTIONS]", COMMANDS, argv, lambda name, rest: _module(name).main(name, rest))


def _module(name: str) -> ModuleType:
    return import_module(f"hvdtrain.cli.timeline.{name}")
