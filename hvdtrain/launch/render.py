"""Filling in the texts that schedulers are given. What comes from a user is quoted where it stands."""

from __future__ import annotations

import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def fill(template: str, **values: Any) -> str:
    """Fill in a file of ``templates``; what it names and is not given is an error."""
    made = Environment(  # noqa: S701  (the texts are no HTML)
        loader=PackageLoader("hvdtrain.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["q"] = shlex.quote
    return made.get_template(template).render(**values)


def clock(seconds: int) -> str:
    """A time as ``HH:MM:SS``."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
