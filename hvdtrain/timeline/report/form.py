"""An analysis as JSON. `python -m hvdtrain.timeline.report.form` prints the JSON Schema."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
import orjson

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Analysis, figures

VERSION: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class Report(Analysis):
    """The output of `hvdtrain timeline report --json` and `timeline/report.json` of a run. Times are ms per step."""

    version: Literal[1] = VERSION  # of this format
    figures: Mapping[str, float]  # numbers by name, as --fail_if uses them


def to_bytes(analysis: Analysis) -> bytes:
    """Return a `Report` as JSON text."""
    return dumped({"version": VERSION, "figures": figures(analysis), **asdict(analysis)})


def dumped(values: Mapping[str, Any]) -> bytes:
    """Return plain values as JSON text.

    Numbers that are not finite, such as the interval of a single step, become null. Bytes of a name that are not text
    become question marks.
    """
    return orjson.dumps(_plain(values), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a `Report`. Every field is required, and there are no others."""
    (top,), types = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    for each in types.values():
        each["description"] = each.get("description", "").partition("\n")[0]
        each |= {"required": list(each["properties"]), "additionalProperties": False}
        for field in each["properties"].values():
            field.pop("default", None)
            if field.pop("nullable", False):  # `Bound`
                field["type"] = [field["type"], "null"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": types}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return wording.readable(value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.stdout.buffer.write(dumped(schema()))
