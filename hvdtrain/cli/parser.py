"""What reads the options of the subcommands."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdtrain.errors import USAGE


class Parser(argparse.ArgumentParser):
    """The standard one, but that an error says what to do next, and a part of an option's name is not the option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_args(  # type: ignore[override]  # into no other object: nobody here does
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> argparse.Namespace:
        """Read all of `args`; what is not known ends the process, as any error does."""
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            self.error(f"{word!r} is one argument too many")
        near = self.near(word)
        self.error(f"there is no option {word}", f"did you mean {near}?" if near else "")

    def error(self, message: str, next_step: str = "") -> NoReturn:
        """Tell it on stderr without the whole usage, and exit."""
        self.exit(USAGE, f"{self.prog}: error: {message}\n  next: {next_step or f'{self.prog} --help'}\n")

    def near(self, option: str) -> str:
        """The option that one which does not exist resembles most; empty where none does."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        return next(iter(difflib.get_close_matches(option, known, n=1)), "")
