"""The options of training as a YAML file in which each says what it does: what `hvdtrain config init` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvdtrain.config.options import Option, Options
from hvdtrain.yaml_file import yaml_text

_WIDTH = 110
_HEAD = """\
Options of `hvdtrain train`, each with its default: hvdtrain train --config FILE
Options of the command line win over those in here. Lines that are left as they are may be deleted.
"""


def to_yaml(options: Options, task: str) -> str:
    """All options with their defaults, each below a comment of what it does; reads back as these defaults.

    Args:
        options: of `Config` and of the function that `task` names.
        task: the task to write into it.
    """
    lines = [*(f"# {line}" for line in _HEAD.splitlines()), ""]
    before: list[str] = []
    for option in options.options:
        *sections, _ = option.name.split(".")
        for depth in range(len(sections)):
            if sections[: depth + 1] != before[: depth + 1]:
                lines += ["", *_section(sections[: depth + 1], options.titles)]
        before = sections
        lines += _entry(replace(option, default=task) if option.name == "task" else option)
    return "\n".join(lines) + "\n"


def _section(path: Sequence[str], titles: Mapping[str, str]) -> list[str]:
    margin = "  " * (len(path) - 1)
    return [*_comment(titles.get(".".join(path), ""), margin), f"{margin}{path[-1]}:"]


def _entry(option: Option) -> list[str]:
    *sections, name = option.name.split(".")
    margin = "  " * len(sections)
    about = " ".join(filter(None, [" ".join(option.effect.split()), f"({option.values})"]))
    if option.required:  # without a value it reads as null, which would hide that it is missing
        return _comment(f"{about} It has to be given: {name}: ...", margin)
    value = yaml_text({name: option.default}, allow_unicode=True, width=1 << 20)
    return [*_comment(about, margin), *(margin + line for line in value.splitlines())]


def _comment(text: str, margin: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}# ")
