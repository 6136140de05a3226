"""Read YAML files of nested options strictly, and write them so that they read back unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hvdtrain.errors import ConfigError
from hvdtrain.files import read_regular

_DEEPEST = 20
_DEPTH = f"at most {_DEEPEST} levels"

_BOOL, _INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp"))
_VALUES = {
    _BOOL: re.compile(r"(true|True|TRUE|false|False|FALSE)$"),
    _INT: re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    _FLOAT: re.compile(r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
}
"""What is no text in YAML 1.2 (its core schema). PyYAML reads 1.1: 017 is 15 there, 1:30 is 90, off is false, and 1e3
is text."""


class Loader(yaml.SafeLoader):
    """Read YAML 1.2's numbers; dates are text. ruamel.yaml reads them, too; PyYAML is here for jsonargparse."""

    yaml_implicit_resolvers: dict[str, Any] = {  # noqa: RUF012  (as PyYAML declares it)
        first: [(tag, pattern) for tag, pattern in known if tag not in (*_VALUES, _TIME)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return an integer; a leading 0 means nothing."""
        text = str(self.construct_scalar(node))
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)


class _Dumper(yaml.SafeDumper):
    """Quote text that either version of YAML reads as a number."""


Loader.add_constructor(_INT, Loader.construct_yaml_int)
for _type in (Loader, _Dumper):
    for _tag, _pattern in _VALUES.items():
        _type.add_implicit_resolver(_tag, _pattern, list("-+.0123456789tTfF"))


def yaml_text(options: Mapping[str, Any], **layout: Any) -> str:
    """Return nested options as YAML in the same order. For `layout` see `yaml.dump`."""
    return str(yaml.dump(dict(options), Dumper=_Dumper, sort_keys=False, **layout))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options by dotted name: ``{"train": {"steps": 5}}`` as ``{"train.steps": 5}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class TextLoader(yaml.SafeLoader):
    """Read every scalar without a tag as text: an account 0123 and a time 1:30:00 are no numbers."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (as PyYAML declares it)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file.

    Errors: ConfigError if it cannot be read, is not YAML or no mapping, has a duplicate key, or is nested too deeply.
    """
    try:
        text = read_regular(path)
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {str(path)!r}: {error.strerror}",
            found=f"working directory {Path.cwd()}",
            next_step="correct the path; hvdtrain train --print_config > FILE writes a new file",
        ) from None
    return parse_yaml(text, f"the config file {str(path)!r}", "lines like `train: {steps: 100}`")


def parse_yaml(text: bytes, what: str, expected: str, loader_type: type[yaml.SafeLoader] = Loader) -> dict[str, Any]:
    """Return the mapping in the text of a file. `what` names the file in errors, `expected` its lines.

    Errors: ConfigError if it is not YAML or no mapping, has a duplicate key, or is nested too deeply.
    """
    try:
        loader = loader_type(text.decode("utf-8"))
        try:
            root = loader.get_single_node()
            if root is not None:
                _check_nodes(root, what)
            content = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply", expected=_DEPTH) from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:  # explicit tags cause others
        raise ConfigError(f"{what} is not YAML", found=_described(error)) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{what} is not a mapping", expected=expected)
    return content


def _described(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _check_nodes(root: yaml.Node, what: str) -> None:
    """Reject duplicate keys, also dotted ones, and endless nesting. PyYAML would silently use the last duplicate."""
    pending = [(root, 0, "")]
    visited = 0
    keys = set()
    while pending:
        node, depth, prefix = pending.pop()
        visited += 1
        if depth > _DEEPEST or visited > 100_000:  # recursive aliases, or ones that expand exponentially
            raise ConfigError(f"{what} is nested too deeply", expected=_DEPTH)
        if isinstance(node, yaml.SequenceNode):
            pending += [(value, depth + 1, f"{prefix}{place}.") for place, value in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            for place, (key, value) in enumerate(node.value):
                name = prefix + (key.value if isinstance(key, yaml.ScalarNode) else f"[{place}]")
                if name in keys and key.value != "<<":
                    found = f"a second one in line {key.start_mark.line + 1}"
                    raise ConfigError(f"{what} has the key {name} twice", expected="each option once", found=found)
                keys.add(name)
                pending += [(key, depth + 1, f"{name}?"), (value, depth + 1, f"{name}.")]
