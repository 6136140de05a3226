"""The options of training as a list: name, effect, default, values. What tells of them reads it here."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from hvdtrain.config.parse import make_parser

_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
}


@dataclass(frozen=True)
class Option:
    """One option of training.

    Attributes:
        name: as it stands behind ``--``: ``train.steps``.
        effect: what its docstring says.
        default: as YAML gives it.
        required: whether it has no default, and must be given.
        values: what may be given, in words.
        choices: all that may be given, where these are few.
    """

    name: str
    effect: str
    default: Any
    required: bool
    values: str
    choices: tuple[str, ...]

    @property
    def section(self) -> str:
        """The part of the name before the last dot; empty for options without one."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Options:
    """All options, in the order of their declaration, and what each section is about."""

    options: tuple[Option, ...]
    titles: Mapping[str, str]


def options(task_function: Callable[..., Any] | None) -> Options:
    """All options of `Config` and of the parameters of `task_function`."""
    parser = make_parser(task_function)
    defaults = parser.get_defaults(skip_validation=True)
    plain = yaml.safe_load(parser.dump(defaults, skip_validation=True))
    leaves = defaults.as_flat()
    found = [
        Option(
            name=action.dest,
            effect=(action.help or "").strip(),
            default=_value(plain, action.dest),
            required=action.required,
            values=_words(getattr(action, "_typehint", None)),
            choices=_choices(getattr(action, "_typehint", None)),
        )
        for action in parser._actions
        if hasattr(leaves, action.dest) or hasattr(action, "_typehint")
    ]
    titles = {
        action.dest: group.title or ""
        for group in parser._action_groups
        for action in group._group_actions
        if any(option.section == action.dest for option in found)
    }
    return Options(tuple(option for option in found if option.name != "config"), titles)


def _value(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("true", "false")
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(choice for part in get_args(hint) for choice in _choices(part))
    return ()


def _words(hint: Any) -> str:
    """A type in words, as a person would say what may be given."""
    if hint in _WORDS:
        return _WORDS[hint]
    if get_origin(hint) is Literal:
        return " or ".join(filter(None, [", ".join(map(str, get_args(hint)[:-1])), str(get_args(hint)[-1])]))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_words, get_args(hint)))
    if get_origin(hint) is list:
        return f"list of {_words(get_args(hint)[0])}"
    name = str(getattr(hint, "__name__", hint))
    return "anything" if name in ("Any", "None", "Untyped") else name
