"""The options of training as a list, and the help made from it."""

from __future__ import annotations

import types
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin

import jsonargparse
import yaml

from hvdtrain.config.schema import Config

_METAVARS = {
    **dict.fromkeys(("run_dir", "model.from", "data.dataset"), "DIR"),
    **dict.fromkeys(("model.config", "data.tokens", "data.tokenizer"), "FILE"),
    **dict.fromkeys(("data.text", "data.chat", "data.validation"), "GLOB"),
    **dict.fromkeys(("observe.timeline", "observe.profile"), "STEPS"),
    "observe.prometheus": "PORT|FILE",
    "observe.otlp": "URL",
    "resume": "CHECKPOINT",
    "parallel.compression": "NAME",
}
"""Placeholders of options for which the last part of the name says nothing new."""
_SECTIONS = ("", "model", "data", "train", "optimizer", "parallel", "memory", "checkpoint", "loader", "elastic",
             "observe")  # fmt: skip
"""The order in which a newcomer needs the sections. Other sections of a task come last."""


@dataclass(frozen=True)
class Option:
    """One option of training."""

    name: str  # after ``--``, such as ``train.steps``
    effect: str  # the description from its docstring
    default: Any  # as YAML would give it
    required: bool  # True if it has no default
    hint: Any  # the type of its values
    choices: tuple[str, ...]  # all accepted values, if they are few
    metavar: str  # the placeholder for its value in help
    title: str  # of its section; may be empty

    @property
    def section(self) -> str:
        """The part of the name before the last dot; empty for options without one."""
        return self.name.rpartition(".")[0]

    def help_text(self) -> str:
        """Return the description with the default, which is shown once."""
        if self.required:
            return f"{self.effect} (required)".strip()
        if "(default: " in self.effect:
            return self.effect
        return f"{self.effect} (default: {_shown(self.default)})".strip()


def list_options(parser: jsonargparse.ArgumentParser) -> list[Option]:
    """List the options that `make_parser` declared, in the order of help."""
    defaults = parser.get_defaults(skip_validation=True)
    plain = yaml.safe_load(parser.dump(defaults, skip_validation=True))
    leaves = defaults.as_flat()
    titles = {action.dest: group.title for group in parser._action_groups for action in group._group_actions}
    found = []
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if action.dest != "config" and (hasattr(leaves, action.dest) or hint is not None):
            found.append(
                Option(
                    name=action.dest,
                    effect=(action.help or "").strip(),
                    default=_lookup(plain, action.dest),
                    required=action.required,
                    hint=hint,
                    choices=_choices(hint),
                    metavar=_metavar(hint, action.dest),
                    title=titles.get(action.dest.rpartition(".")[0]) or "",
                )
            )
    return sorted(found, key=_order)


def plain_parser(options: Sequence[Option]) -> ArgumentParser:
    """Declare the options with argparse, for help."""
    made = ArgumentParser(
        prog="hvdtrain train",
        usage="hvdtrain train [--config FILE] [--task TASK] [--OPTION VALUE ...]",
        description="Train a model on all ranks of this job.",
        epilog="Options of other tasks: hvdtrain train --task TASK --help",
        add_help=False,
    )
    groups = {"": made.add_argument_group("task and run")}
    groups[""].add_argument("-h", "--help", action="help", help="show this help and exit")
    groups[""].add_argument("--config", metavar="FILE", help="YAML file of options; later options override it")
    groups[""].add_argument("--print_config", action="store_true", help="print all options as YAML and exit")
    for option in options:
        section = option.section
        if section not in groups:
            groups[section] = made.add_argument_group(f"{section} ({option.title})" if option.title else section)
        groups[section].add_argument(
            f"--{option.name}",
            choices=option.choices or None,
            metavar=None if option.choices else option.metavar,
            help=option.help_text().replace("%", "%%"),
        )
    return made


def _order(option: Option) -> tuple[int, bool]:
    section = option.section.partition(".")[0]
    known = {field.name for field in fields(Config)}
    place = _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)
    return place, not section and option.name not in known


def _lookup(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _shown(default: Any) -> str:
    if default is None or default == []:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> tuple[str, ...]:
    found: list[str] = []
    for part in _members(hint):
        if part is bool:
            found += ["true", "false"]
        elif get_origin(part) is Literal:
            found += map(str, get_args(part))
        elif part is not type(None):
            return ()  # others are possible
    return tuple(found)


def _metavar(hint: Any, name: str) -> str:
    members = [part for part in _members(hint) if part is not type(None)]
    if len(members) == 1:
        if get_origin(members[0]) is list:
            return "[A,B,...]"
        if members[0] in (int, float):
            return "N" if members[0] is int else "X"
    return _METAVARS.get(name, name.rpartition(".")[2].upper())
