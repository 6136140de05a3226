"""An analysis as JSON, described by `report.schema.json` beside this file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import orjson

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, figures

VERSION = 1


def to_json(analysis: Analysis) -> dict[str, Any]:
    """Plain values: all of an analysis, and its figures by the names that ``--fail_if`` knows.

    Numbers that are not finite, such as the interval of a single step, stand as null; what a name holds that is no
    text, as a folder's can, as a question mark.
    """
    values = {"version": VERSION, "figures": figures(analysis), **asdict(analysis)}
    plain: dict[str, Any] = _plain(values)
    return plain


def to_bytes(analysis: Analysis) -> bytes:
    """The same as a file holds it."""
    return dumped(to_json(analysis))


def dumped(values: Mapping[str, Any]) -> bytes:
    """Any plain values as a file or a terminal gets them, whatever their texts hold."""
    return orjson.dumps(_plain(values), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def schema() -> dict[str, Any]:
    """What `to_json` makes, as a JSON Schema (2020-12)."""
    found: dict[str, Any] = orjson.loads(files("hvdtrain.timeline.report").joinpath("report.schema.json").read_bytes())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return wording.readable(value)
    return value
