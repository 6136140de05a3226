"""``hvdtrain plan``: say what the ranks of a job would do, and which options do not go together."""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from itertools import pairwise

from hvdtrain.cli.parser import Parser, local, positive
from hvdtrain.config.schema import Config

_DESCRIPTION = """\
Say which ranks hold what of a model, what they send, and which options do not
go together. Needs no torch, no model and no other rank."""
_EPILOG = """\
Options of hvdtrain train that every run has are accepted, too; those of the
task, such as --model.preset, do not change the plan: a file may have them.

examples:
  hvdtrain plan --config run.yaml --ranks 64
  hvdtrain plan --ranks 16 --parallel.tp 2 --parallel.shard optimizer

exit code: 0 if the options go together, 2 if not
"""

_NAMES = {field.name for field in fields(Config)}


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain plan", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--ranks", type=positive, default=8, metavar="N", help="number of ranks (default: 8)")
    made.add_argument("--config", type=local, metavar="FILE", help="YAML file with options")
    made.add_argument("--elastic", action="store_true", help="of a job in which ranks may come and go")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: list[str]) -> int:
    """Print the plan. Return 0.

    Errors: ConfigError: the options do not go together, or not with this number of ranks.
    """
    options, rest = parser().parse_known_args(argv)
    from hvdtrain.config.parse import parse_argv
    from hvdtrain.plan.description import describe
    from hvdtrain.plan.refusals import resolve
    from hvdtrain.yaml_file import flatten, read_yaml

    given = []
    if options.config is not None:
        flat = flatten({name: value for name, value in read_yaml(options.config).items() if name in _NAMES})
        given = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in flat.items()]
    rest, others = _divide(rest)
    plan = resolve(parse_argv([*given, *rest], None).config, elastic=options.elastic)
    found = describe(plan, options.ranks)
    if options.json:
        print(json.dumps([{"name": name, "value": value} for name, value in found], indent=1))
        return 0
    for (before, _), (name, value) in pairwise([("", ""), *found]):
        name = "" if name == before else name
        print(textwrap.fill(f"{name:<16} {value}", 79, subsequent_indent=" " * 17))
    if others:
        print(f"not a part of the plan: {', '.join(others)}")
    return 0


def _divide(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the options of every run, with their values, and the names of others, which may be those of a task."""
    own, others = list[str](), list[str]()
    is_own = True
    for word in argv:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_own = name[2:].replace("-", "_").partition(".")[0] in _NAMES
            others += [] if is_own else [name]
        own += [word] if is_own else []
    return own, others
