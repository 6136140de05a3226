"""Merge the options of a site's profile with those of a command line of ``hvdtrain launch``, by the same parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from hvdtrain.cli.launch_options import parse, parser
from hvdtrain.cli.parser import Parser
from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import options_of
from hvdtrain.launch.site import Site, wrong

_OF_COMMAND = ("help", "dry_run", "site")
"""Options that make no sense in a profile."""


class _Strict(Parser):
    """A parser that raises its errors."""

    def error(self, message: str, next_step: str = "") -> NoReturn:
        raise LaunchError(message)


def merge(site: Site, argv: Sequence[str], typed: argparse.Namespace, target: str | None = None) -> argparse.Namespace:
    """Return the options of a profile, overridden by those of the command line. Repeated options add to its own.

    Args:
        site: the profile.
        argv: the command line.
        typed: its options alone.
        target: leave out options of the profile that it does not take; None for all of them.

    Errors:
        LaunchError: the profile has an unknown option or an invalid value.
    """
    by_option = _words(site)
    if typed.hosts:
        by_option.pop("discover", None)
    words = [word for name, some in by_option.items() if target is None or name in options_of(target) for word in some]
    return parse([*words, *argv])


def _words(site: Site) -> dict[str, list[str]]:
    """Return the words of a command line with the options of a profile, by option; checked."""
    made = parser(_Strict)
    declared = [(option, action) for action in made._actions for option in action.option_strings]
    long = {option: (option, action) for option, action in declared if action.dest not in _OF_COMMAND}
    words: dict[str, list[str]] = {}
    for name, value in site.options.items():
        option, action = long.get(f"--{name.replace('_', '-')}", ("", None))
        if action is None:
            near = made.nearest_option(f"--{name}").removeprefix("--")
            next_step = f"did you mean {near.replace('-', '_')}?" if near else "see hvdtrain launch --help"
            what = f"there is no option {name!r}"
            raise wrong(site.path, what, expected="a long name of an option, such as queue", next_step=next_step)
        if action.dest in words:
            raise wrong(site.path, f"options: {name} is given twice", expected="one spelling of each option")
        many = not isinstance(value, str)
        if many and not isinstance(action.default, list):
            raise wrong(site.path, f"options: {name} has several values", expected="one", found=", ".join(value))
        values = [value] if isinstance(value, str) else list(value)
        if action.nargs == 0:
            if values not in (["true"], ["false"]):
                raise wrong(site.path, f"options: {name} is invalid", expected="true or false", found=values[0])
            words[action.dest] = [option] if values == ["true"] else []
        else:
            words[action.dest] = [f"{option}={text}" for text in values]
        try:
            made.parse_known_args(words[action.dest])
        except LaunchError as error:
            raise wrong(site.path, error.what) from None
    words["env"] = [*words.get("env", []), *(f"--env={name}" for name in site.environment)]
    return words
