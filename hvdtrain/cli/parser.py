"""The option parser of all subcommands, and groups of commands such as ``hvdtrain timeline``."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.config.spelling import EitherSpelling
from hvdtrain.errors import USAGE, HvdtrainError
from hvdtrain.files import is_url

MODEL_HELP = "run folder, RUN@best, RUN@STEP, checkpoint, or folder of transformers"
"""Of the argument RUN of commands that use a model."""


def local(text: str) -> Path:
    """Convert an option's text. Errors: ArgumentTypeError: it is the address of something elsewhere."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no local path; mount the storage, or copy what is there")
    return Path(text)


def positive(text: str) -> int:
    """Convert an option's text. Errors: ArgumentTypeError: it is no whole number of 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def above_0(text: str, most: float = 1e15) -> float:
    """Convert an option's text. Errors: ArgumentTypeError: it is no number above 0 and below `most`."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


class Parser(EitherSpelling):
    """An argparse parser with short errors that say what to do next. It accepts no abbreviated options.

    With an epilog, such as examples, the lines of description and epilog stay as they are.
    """

    def __init__(self, **settings: Any) -> None:
        if "epilog" in settings:
            settings["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, add_help=False, **settings)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def parse_args(  # type: ignore[override]  # no caller passes an object for the result
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Parse all of `args`. An unknown option ends the process, as any other error does."""
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        near = self.nearest_option(word)
        self.error(f"there is no option {word}", f"did you mean {near}?" if near else "")

    def format_help(self) -> str:
        """Return the help text, with a short usage: only positional arguments and required options."""
        if self.usage is None:
            formatter = self.formatter_class(prog=f"{self.prog} [OPTIONS]")
            required = [action for action in self._actions if action.required or not action.option_strings]
            formatter.add_usage(None, required, [], prefix="")
            self.usage = formatter.format_help().strip().replace("%", "%%")
        return super().format_help()

    def error(self, message: str, next_step: str = "") -> NoReturn:
        """Print the error and the next step to stderr, without the usage, and exit."""
        self.exit(USAGE, f"{self.prog}: error: {message}\n  next: {next_step or f'{self.prog} --help'}\n")

    def nearest_option(self, option: str) -> str:
        """Return the known option that is most similar to an unknown one, or "" if none is similar."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        return next(iter(difflib.get_close_matches(option, known, n=1)), "")


def unknown_command(name: str, commands: Iterable[str], group: str = "") -> str:
    """Return the message for a word that is not a command; it may be an option without its dashes."""
    message = f"hvdtrain: there is no command {name!r}{f' of {group}' if group else ''}\n"
    message += f"  expected: one of {', '.join(commands)}\n"
    if near := difflib.get_close_matches(name, commands, 1):
        return f"{message}  next: did you mean {near[0]}?\n"
    if not group and {".", "="} & set(name):
        return f"{message}  next: options begin with --, as in hvdtrain --train.steps 100\n"
    return message


def run_group(
    group: str, operands: str, commands: Mapping[str, str], argv: list[str], call: Callable[[str, list[str]], int]
) -> int:
    """Choose and run a command of a group, handle its errors, and return its exit code.

    The code is 1 after an error, 2 for an unknown command. `operands`: what the usage shows after the command;
    `commands`: descriptions by name; `call`: runs a command.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        wrapped = [textwrap.wrap(f"{name:<8} {text}", 77) for name, text in commands.items()]
        lines = "\n".join("  " + ("\n" + " " * 11).join(each) for each in wrapped)
        sys.stdout.write(f"usage: hvdtrain {group} COMMAND {operands}\n\n{lines}\n\n")
        sys.stdout.write(f"hvdtrain {group} COMMAND --help lists the options of a command.\n")
        return 0
    name, *rest = argv
    if name not in commands:
        sys.stderr.write(unknown_command(name, commands, group))
        return USAGE
    try:
        return call(name, rest)
    except HvdtrainError as error:
        sys.stderr.write(f"hvdtrain: {type(error).__name__}: {error}\n")
        return 1
