"""``hvdtrain verify``: what can be proven of a run."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import import_module

from hvdtrain.cli.group import run

COMMANDS = {
    "data": "every sample of each epoch was taken exactly once, whatever was killed or resized",
    "resume": "a run that is interrupted equals one that is not, on its number of ranks and on others",
}


def parser(name: str) -> ArgumentParser:
    """Declare the options of a command of this group."""
    made: ArgumentParser = import_module(f"hvdtrain.cli.verify.{name}").parser()
    return made


def main(argv: list[str]) -> int:
    """Run a command of this group; 0, 1 where it does not hold or an error came, 2 on a wrong option."""

    def call(name: str, rest: list[str]) -> int:
        code: int = import_module(f"hvdtrain.cli.verify.{name}").main(rest)
        return code

    return run("verify", "RUN [OPTIONS]", COMMANDS, argv, call)
