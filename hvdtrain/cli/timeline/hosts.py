"""``hvdtrain timeline hosts``: which hosts and devices slowed jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cli.parser import Parser, local
from hvdtrain.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from hvdtrain.timeline.analysis.slow_hosts import Place

_MOST = 10
"""Places of a kind that are printed."""

_EPILOG = """\
examples:
  hvdtrain timeline hosts runs/NAME
  hvdtrain timeline hosts runs/*
  hvdtrain timeline hosts runs/* --groups racks.txt
                             also compare racks: each line of the file is
                             HOST RACK
  hvdtrain timeline hosts runs/* --json
                             for a scheduler: `hosts`, most costly first

All starts of the runs are judged, those of elastic jobs too. A host is slow
in a start if one of its ranks is a straggler there.
"""


def main(command: str, argv: list[str]) -> int:
    """Print the hosts of runs, most costly first; return the exit code: 2 if the file of groups is wrong."""
    options = parser(command).parse_args(argv)

    from hvdtrain.timeline.analysis.slow_hosts import slow_hosts
    from hvdtrain.timeline.report.form import dumped
    from hvdtrain.timeline.run import read_stamped

    starts = [start for run in options.run for start in read_stamped(run)]
    if not starts:
        raise TraceError(
            f"there are no step stamps in {', '.join(map(str, options.run[:3]))}",
            expected="folders of runs with timeline/steps.jsonl",
            next_step="name the folders of runs that recorded traces",
        )
    try:
        kinds = slow_hosts(starts, _groups(options.groups))
    except ConfigError as error:
        sys.stderr.write(f"hvdtrain: ConfigError: {error}\n")
        return 2
    if options.json:
        plain = {
            kind: [{**vars(place), "causes": list(dict(place.causes.most_common()))} for place in each]
            for kind, each in kinds.items()
        }
        sys.stdout.write(dumped({"version": 1, **plain}).decode())
        return 0
    for kind, each in kinds.items():
        print("\n".join(_lines(kind, each)))
    return 0


def _groups(file: Path | None) -> dict[str, str]:
    """Read a file with lines ``HOST GROUP``. Errors: ConfigError if it cannot be read, or a line is another."""
    if file is None:
        return {}
    try:
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'no text'}") from None
    for number, words in enumerate(lines, 1):
        if len(words) != 2:
            raise ConfigError(f"line {number} of {file}", expected="HOST GROUP", found=" ".join(words)[:80])
    return dict(lines)


def _lines(kind: str, places: Sequence[Place]) -> list[str]:
    from hvdtrain.observe.cost import number

    slow = [place for place in places if place.slow_starts]
    wrong = [f"{place.name} ({place.wrong_bits})" for place in places if place.wrong_bits]
    lines = [f"{kind} with wrong bits, to be taken out and tested: {', '.join(wrong)}"] if wrong else []
    if not slow:
        return [*lines, f"{kind}: none of {len(places)} was slow"] if places else []
    lines += [f"{kind}, by the device-hours that jobs waited for them:"]
    for place in slow[:_MOST]:
        where = f" on {place.host}" if place.host not in ("", place.name) else ""
        why = f"  {', '.join(name for name, _ in place.causes.most_common(2))}" if place.causes else ""
        starts = f"slow in {place.slow_starts} of {place.starts} start{'s' if place.starts > 1 else ''}"
        lines.append(f"  {place.name + where:<40} {number(place.device_hours):>10}  {starts}{why}")
    if len(slow) > _MOST:
        lines.append(f"  {len(slow) - _MOST} more: --json")
    return lines


def parser(command: str) -> Parser:
    """Declare the options."""
    what = "Name the hosts and GPUs that slowed jobs, most costly first, over all starts of runs."
    made = Parser(prog=f"hvdtrain timeline {command}", description=what, epilog=_EPILOG)
    made.add_argument("run", nargs="+", type=local, metavar="RUN", help="a run's folder")
    made.add_argument("--groups", type=local, metavar="FILE", help="groups of hosts, such as racks: lines HOST GROUP")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made
