"""The spelling of options: ``--run-dir`` and ``--run_dir`` name the same one, in every command."""

from __future__ import annotations

import argparse
from collections.abc import Container, Mapping
from functools import lru_cache
from keyword import iskeyword
from pathlib import Path
from typing import Any


def option_name(name: str) -> str:
    """Return the name of an option for a field; `from_` is for `from`, which Python reserves."""
    short = name.removesuffix("_")
    return short if iskeyword(short.rpartition(".")[2]) else name


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


@lru_cache(1)
def elsewhere() -> Mapping[str, Mapping[str, Any]]:
    """Return by our options what other trainers call them, and remarks."""
    from hvdtrain.yaml_file import read_yaml  # only after an error

    return read_yaml(Path(__file__).with_name("elsewhere.yaml"))


def known_elsewhere(option: str) -> tuple[str, str] | None:
    """Return our option, perhaps with a value, and a remark or "", for an option of another trainer; else None."""
    name, tables = option.lstrip("-").replace("-", "_"), elsewhere()
    ours = next((ours for ours, theirs in tables["names"].items() if name in theirs), None)
    return None if ours is None else (ours, tables["remarks"].get(ours, ""))
