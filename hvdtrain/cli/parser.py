"""What commands share: the option parser, groups such as ``hvdtrain timeline``, and how they end after an error."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hvdtrain.config.spelling import EitherSpelling
from hvdtrain.errors import USAGE, HvdtrainError, exit_code
from hvdtrain.files import is_url
from hvdtrain.observe.failure.fault import is_installed
from hvdtrain.observe.output import FailureOutput
from hvdtrain.runtime.environment import RankInfo, rank_label

MODEL_HELP = "run folder, RUN@latest, RUN@best, RUN@STEP, checkpoint, or folder of transformers"
"""Of the argument RUN of commands that use a model."""


def local(text: str) -> Path:
    """Convert an option's text. Errors: ArgumentTypeError: it is the address of something elsewhere."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no local path; mount the storage, or copy what is there")
    return Path(text)


def positive(text: str) -> int:
    """Convert an option's text. Errors: ArgumentTypeError: it is no whole number of 1 or more."""
    if not text.strip().isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positives(text: str) -> list[int]:
    """Convert numbers of ranks with commas. Errors: ArgumentTypeError: one is no whole number of 1 or more."""
    try:
        return [positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; expected numbers of ranks such as 1,2") from None


def above_0(text: str, most: float = 1e15, *, or_0: bool = False) -> float:
    """Convert an option's text. Errors: ArgumentTypeError: it is no number above 0, or 0 if allowed, below `most`."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < most and not (or_0 and number == 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {'of 0 or more' if or_0 else 'above 0'}")
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

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
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


EXIT_OF_SIGNAL = {"SIGTERM": 143, "SIGINT": 130}
_WAIT_FOR_OTHERS_S = 5.0


def end(error: BaseException, info: RankInfo | None, output: FailureOutput | None = None) -> int:
    """Print the error to stderr, unless the failure card of `output` did, and return the exit code.

    In a job of several ranks, end this process immediately; the launcher ends the others. Each rank prints its own
    error if there is no shared run folder yet. Rank 0 prints an error that all ranks have.
    """
    several = info is not None and info.size > 1
    if output is None or not output.reported:
        is_consequence = getattr(error, "consequence", False) or type(error).__name__ == "HorovodInternalError"
        is_of_rank_0 = getattr(error, "everywhere", False) and info is not None and info.rank != 0
        if several and (is_consequence or is_of_rank_0):  # another rank has the same error, or a more specific one
            # Let the other rank print first: the launcher ends it as soon as this one exits. If nothing ends this rank
            # in the meantime, it was the only one with the error. A launcher that ends ranks by SIGTERM may report
            # their exit code as that of the job.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(_code(error)))
            time.sleep(_WAIT_FOR_OTHERS_S)
        show(_report(error, info))
    sys.stdout.flush()
    if several:
        # A normal exit would wait for the other ranks in Horovod's shutdown, while they wait for this one.
        os._exit(_code(error))
    return _code(error)


def show(text: str) -> None:
    """Write to stderr and flush."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _code(error: BaseException) -> int:
    return EXIT_OF_SIGNAL["SIGINT"] if isinstance(error, KeyboardInterrupt) else exit_code(error)


def _report(error: BaseException, info: RankInfo | None) -> str:
    label = f" on {rank_label(info)}" if info and info.size > 1 else ""
    if isinstance(error, HvdtrainError):
        return f"hvdtrain: {type(error).__name__}{label}: {error}\n"
    if isinstance(error, KeyboardInterrupt):
        return "hvdtrain: interrupted\n"
    if isinstance(error, SyntaxError) and error.filename and not is_installed(error.filename):
        text = "".join(traceback.format_exception_only(error))
        return f"{text}hvdtrain: {error.filename} cannot be imported{label}, see above\n"
    trace = traceback.TracebackException.from_exception(error)
    users = [number for number, frame in enumerate(trace.stack) if not is_installed(frame.filename)]
    if users:
        last = trace.stack[users[-1]]
        del trace.stack[: users[0]]
        where = f"{last.name}, {last.filename}:{last.lineno}"
        return f"{''.join(trace.format())}hvdtrain: {type(error).__name__}{label} in {where}, see above\n"
    return f"{''.join(trace.format())}hvdtrain: unexpected error{label}, see above\n"
