"""The option parser of all subcommands."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdtrain.config.spelling import EitherSpelling
from hvdtrain.errors import USAGE


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
            self.error(f"{word!r} is one argument too many")
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
