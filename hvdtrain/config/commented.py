"""Write the options of training as a YAML file with a comment for each, for `hvdtrain config init`."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from hvdtrain.config.options import Option, Options
from hvdtrain.yaml_file import yaml_text

_WIDTH = 110
_HEAD = """\
# Options of `hvdtrain train`, each with its default. Use: hvdtrain train --config FILE
# Options on the command line override this file. You may delete lines that you do not change.
"""


def to_yaml(options: Options, task: str) -> str:
    """Return all options with their defaults, each below a comment; reading it gives these defaults.

    Args:
        options: options of `Config` and of the function that `task` names.
        task: the value to write for the option `task`.
    """
    lines = [_HEAD]
    before: list[str] = []
    for option in options.options:
        *sections, _ = option.name.split(".")
        for depth, name in enumerate(sections):
            path = sections[: depth + 1]
            if path != before[: depth + 1]:
                margin = "  " * depth
                lines += ["", *_comment(options.titles.get(".".join(path), ""), margin), f"{margin}{name}:"]
        before = sections
        lines += _entry(replace(option, default=task) if option.name == "task" else option)
    return "\n".join(lines) + "\n"


def _entry(option: Option) -> list[str]:
    *sections, name = option.name.split(".")
    margin = "  " * len(sections)
    effect, default, rest = " ".join(option.effect.split()).rpartition("(default: ")
    about = f"{effect}({option.values}; default: {rest}" if default else f"{rest} ({option.values})".strip()
    if option.required:  # an empty value would read as null, and hide that it is missing
        return _comment(f"{about} (required) {name}: ...", margin)
    value = yaml_text({name: option.default}, allow_unicode=True, width=1 << 20)
    return [*_comment(about, margin), *(margin + line for line in value.splitlines())]


def _comment(text: str, margin: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{margin}# ", subsequent_indent=f"{margin}# ")
