"""``hvdtrain verify``: check the data and the resume of a run."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import import_module

from hvdtrain.cli.group import run

COMMANDS = {
    "data": "check that every sample of each epoch was used exactly once, over kills and resizes",
    "resume": "check that an interrupted run equals an uninterrupted one, also on other numbers of ranks",
}


def parser(name: str) -> ArgumentParser:
    """Declare the options of a command of this group."""
    made: ArgumentParser = import_module(f"hvdtrain.cli.verify.{name}").parser()
    return made


def main(argv: list[str]) -> int:
    """Run a command of this group. Return 0, 1 if a check fails or on an error, 2 on a wrong option."""

    def call(name: str, rest: list[str]) -> int:
        code: int = import_module(f"hvdtrain.cli.verify.{name}").main(rest)
        return code

    return run("verify", "RUN [OPTIONS]", COMMANDS, argv, call)
