"""Render the templates of schedulers. User input is quoted in the template."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hvdtrain.launch.spec import join


def fill(template: str, **values: Any) -> str:
    """Render a file of ``templates``, with the filters q for shells and y for YAML. A missing value is an error."""
    made = Environment(  # noqa: S701  (not HTML)
        loader=PackageLoader("hvdtrain.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["q"] = lambda word: join([word])
    made.filters["y"] = json.dumps
    return made.get_template(template).render(**values)


def clock(seconds: int) -> str:
    """Return a time as ``HH:MM:SS``."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
