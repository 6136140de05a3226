"""The spelling of options: ``--run-dir`` and ``--run_dir`` name the same one, in every command."""

from __future__ import annotations

import argparse
from collections.abc import Container
from typing import Any


class EitherSpelling(argparse.ArgumentParser):
    """A parser that accepts ``-`` for ``_`` in the name of an option, and the reverse.

    Each option is declared once. Help and messages show the declared spelling. Values, and whatever follows ``--``,
    stay as they are.
    """

    def _parse_optional(self, arg_string: str) -> Any:
        # argparse asks this method, on every version, which option a word is.
        return super()._parse_optional(declared_spelling(arg_string, self._option_string_actions))


def declared_spelling(word: str, options: Container[str]) -> str:
    """Return a word of a command line with the name of its option as declared; any other word as it is."""
    name, equals, value = word.partition("=")
    if not word.startswith("--") or name in options:
        return word
    for one, other in ("_-", "-_"):
        spelled = f"--{name[2:].replace(one, other)}"
        if spelled in options:
            return f"{spelled}{equals}{value}"
    return word
