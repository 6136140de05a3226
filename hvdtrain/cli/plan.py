"""``hvdtrain plan``: say what the ranks of a job would do, and which options do not go together."""

from __future__ import annotations

import json
import textwrap
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cli.launch_options import duration_s
from hvdtrain.cli.parser import Parser, above_0, local, positive
from hvdtrain.config.schema import Config
from hvdtrain.run_layout import RunLayout

if TYPE_CHECKING:
    from hvdtrain.plan.plan import Plan

_DESCRIPTION = """\
Say which ranks hold what of a model, what they send, and which options do not
go together. Needs no torch, no model and no other rank. With the config.yaml of
a run, which has measured its model and its steps, it says how many bytes, and
when the job would end, what it would cost, and what would be faster."""
_EPILOG = """\
Options of hvdtrain train that every run has are accepted, too; those of the
task, such as --model.preset, do not change the plan: a file may have them.

examples:
  hvdtrain plan --config run.yaml --ranks 64
  hvdtrain plan --ranks 16 --parallel.tp 2 --parallel.shard optimizer
  hvdtrain plan --config runs/NAME/config.yaml --ranks 64 --hosts 8 \\
      --train.steps 20000 --deadline 12h --failures_per_day 0.5

exit code: 0 if the options go together, 2 if not
"""

_NAMES = {field.name for field in fields(Config)}


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain plan", description=_DESCRIPTION, epilog=_EPILOG)
    made.add_argument("--ranks", type=positive, default=8, metavar="N", help="number of ranks (default: 8)")
    made.add_argument("--hosts", type=positive, metavar="N", help="number of hosts (default: as in the run)")
    made.add_argument("--deadline", type=duration_s, metavar="T", help="when the job has to end, such as 12h")
    link = "bandwidth of each host's link, in Gbit/s (default: as in the run)"
    made.add_argument("--bandwidth_gbit", type=above_0, metavar="X", help=link)
    latency = "latency of a small message between two ranks, in microseconds (default: as in the run)"
    made.add_argument("--latency_us", type=above_0, metavar="X", help=latency)
    failures = "how often a rank or host of the job fails (default: 0)"
    rate = partial(above_0, most=1e9, or_0=True)
    made.add_argument("--failures_per_day", type=rate, default=0.0, metavar="X", help=failures)
    made.add_argument("--config", type=local, metavar="FILE", help="YAML file with options")
    made.add_argument("--elastic", action="store_true", help="of a job in which ranks may come and go")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: list[str]) -> int:
    """Print the plan. Return 0.

    Errors: ConfigError: the options do not go together, or not with this number of ranks.
    """
    made = parser()
    options, rest = made.parse_known_args(argv)
    if options.hosts is not None and options.hosts > options.ranks:
        made.error(f"--hosts {options.hosts} are more than the {options.ranks} rank(s) of --ranks")
    from hvdtrain.config.parse import parse_argv
    from hvdtrain.plan.description import describe
    from hvdtrain.plan.plan import plan_of
    from hvdtrain.plan.refusals import resolve
    from hvdtrain.timeline.whatif.outlook import Asked, outlook
    from hvdtrain.yaml_file import flatten, read_yaml

    given = []
    if options.config is not None:
        flat = flatten({name: value for name, value in read_yaml(options.config).items() if name in _NAMES})
        given = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in flat.items()]
    rest, others = _divide(rest)
    config = parse_argv([*given, *rest], None).config
    plan = resolve(config, elastic=options.elastic)
    found = describe(plan, options.ranks)
    if options.config is not None:
        folder, rate = options.config.parent, options.failures_per_day
        if RunLayout(folder).is_run:
            link = options.bandwidth_gbit, options.latency_us
            asked = Asked(config, options.ranks, options.hosts, rate, options.deadline, *link)
            found += outlook(folder, asked)
        found += _in_bytes(folder, plan_of(parse_argv(given, None).config), config, plan, options.ranks)
    if options.json:
        print(json.dumps([{"name": name, "value": value} for name, value in found], indent=1))
        return 0
    for (before, _), (name, value) in pairwise([("", ""), *found]):
        name = "" if name == before else name
        print(textwrap.fill(f"{name:<16} {value}", 79, subsequent_indent=" " * 17))
    if others:
        print(f"not a part of the plan: {', '.join(others)}")
    return 0


def _in_bytes(folder: Path, was: Plan, config: Config, plan: Plan, size: int) -> list[tuple[str, str]]:
    """Return what a rank holds and sends with the model of a run, which had another plan; nothing if it is unknown."""
    from hvdtrain.errors import ConfigError
    from hvdtrain.plan.collectives import collectives
    from hvdtrain.plan.description import held
    from hvdtrain.plan.plan import Ranks
    from hvdtrain.timeline.whatif.prediction_text import memory_text
    from hvdtrain.timeline.whatif.read_run import read_gradients
    from hvdtrain.timeline.wording import nbytes

    has_parts = was.dimensions != plan.dimensions and (was.dimensions.divides_model or plan.dimensions.divides_model)
    if not RunLayout(folder).timeline.gradients.is_file() or has_parts or was.engine == "fsdp":
        return []
    gradients, before = read_gradients(folder)
    ranks = Ranks(size, size if before.hosts == 1 else min(size, before.per_host))
    batch, asked = config.train.global_batch, config.train.micro_batch
    passes = -(-batch // ((asked if isinstance(asked, int) else batch) * (size // plan.dimensions.same_samples)))
    try:
        sent = collectives(plan, gradients, ranks, passes)
    except ConfigError:  # no name of a parameter shows a block
        return []
    found = []
    for each in held(plan, gradients, ranks, passes):
        period = "" if each.since == each.until else f", from {each.since} to {each.until}"
        found.append(("held", f"{each.title}: {memory_text(each)}{period}"))
    alike: dict[tuple[str, str, int, str], list[float]] = {}
    for one in sent:
        what = one.name.partition("/")[0]
        alike.setdefault((what, one.kind, one.ranks, one.when), []).append(one.times * one.nbytes)
    for (what, kind, among, when), sizes in alike.items():
        text = f"{what}: {nbytes(sum(sizes))} a step to {among} ranks, in {len(sizes)} {kind}(s), {when}"
        found.append(("sent", text))
    return found


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
