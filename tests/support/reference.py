"""docs/reference.md: options from their dataclasses, and the public names of Python. ``make reference`` writes it."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import hvdtrain
from hvdtrain.config.options import Option, list_options
from hvdtrain.config.parse import make_parser
from hvdtrain.task.base import NAMED, load_task_function
from hvdtrain.training.callbacks.base import Training

_HEAD = """\
# Reference

The [options of training](#options), and [the names of `import hvdtrain`](#python). `make reference` writes this page.
Options of commands are in `hvdtrain COMMAND --help`."""

_TYPE_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}
_ELSEWHERE = {"Config", "__version__"}


def page() -> str:
    """Return the text."""
    return "\n".join([_HEAD, *_sections(), *_python()])


def _sections() -> Iterator[str]:
    yield "\n## Options"
    tasks = {name: list_options(make_parser(load_task_function(name))) for name in sorted(NAMED)}
    shared = set.intersection(*({_row(option) for option in made} for made in tasks.values()))
    first = next(iter(tasks.values()))
    yield from _tables([option for option in first if _row(option) in shared], "")
    for name, made in tasks.items():
        yield from _tables([option for option in made if _row(option) not in shared], f" of task {name}")


def _tables(options: Sequence[Option], of: str) -> Iterator[str]:
    for (section, title), rows in groupby(options, key=lambda option: (option.section, option.title)):
        yield f"\n### {section or 'task and run'}{of}\n"
        yield from [f"{title}.\n"] if title else []
        yield "| option | values | default | effect |\n|---|---|---|---|"
        yield from map(_row, rows)


def _row(option: Option) -> str:
    given = option.default if isinstance(option.default, str) else json.dumps(option.default)
    cells = [
        f"`--{option.name}`",
        _in_words(option.hint),
        "required" if option.required else f"`{given}`",
        option.effect,
    ]
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


def _in_words(hint: Any) -> str:
    """Describe a type as a person would."""
    if hint in _TYPE_NAMES:
        return _TYPE_NAMES[hint]
    if get_origin(hint) is Literal:
        *others, last = map(str, get_args(hint))
        return " or ".join(filter(None, [", ".join(others), last]))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    if get_origin(hint) is list:
        return f"list of {_in_words(get_args(hint)[0])}"
    name = str(getattr(hint, "__name__", hint))
    return "anything" if name in ("Any", "None", "Untyped") else name


def _python() -> Iterator[str]:
    yield "\n## Python"
    public = {f"hvdtrain.{name}": getattr(hvdtrain, name) for name in sorted(set(hvdtrain.__all__) - _ELSEWHERE)}
    for name, found in {**public, "Training, the argument of callbacks": Training}.items():
        yield f"\n### {name}\n\n```text"
        yield _described(found)
        for member, value in vars(found).items():
            if inspect.isclass(found) and isinstance(value, FunctionType | property) and not member.startswith("_"):
                yield f"\n{_described(value)}"
        yield "```"


def _described(found: Any) -> str:
    about = inspect.getdoc(found) or ""
    if isinstance(found, property):
        return f"{found.fget.__name__}: {found.fget.__annotations__['return']}\n{about}"
    if not inspect.isfunction(found):
        return about
    signature = str(inspect.signature(found)).replace("'", "")  # of the annotations
    return f"{found.__name__}{signature}\n{about}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
