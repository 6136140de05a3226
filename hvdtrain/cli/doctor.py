"""``hvdtrain doctor``: what is installed, whether it fits together, and the settings chosen, each with its reason."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.finding import Finding, worst
from hvdtrain.doctor.gather import gather
from hvdtrain.errors import HvdtrainError
from hvdtrain.runtime.environment import RankInfo, environ
from hvdtrain.runtime.tuning import Choice, prepare

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}


def parser() -> argparse.ArgumentParser:
    """Declare the options."""
    made = argparse.ArgumentParser(
        prog="hvdtrain doctor",
        description="Print versions, what Horovod is built with, the launcher and the settings chosen. Under a "
        "launcher rank 0 speaks for all. Exit status: 0 all is well, 1 warnings, 2 something is broken.",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand; gives the exit status: 0 all is well, 1 warnings, 2 something is broken."""
    options = parser().parse_args(argv)
    try:
        info, choices = prepare()
    except HvdtrainError as error:
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}")
        return 2
    if info.rank != 0:
        return 0
    findings = examine(gather(info, choices, environ()))
    if options.json:
        print(json.dumps(as_json(info, findings, choices)))
    elif sys.stdout.isatty():
        _print_table(findings, choices)
    else:
        print("\n".join(lines(findings, choices)))
    return worst(findings)


def as_json(info: RankInfo, findings: Sequence[Finding], choices: Sequence[Choice]) -> dict[str, object]:
    """Give all that is printed as one object; ``format`` changes when a name in it does."""
    return {
        "format": 1,
        "level": max((finding.level for finding in findings), key=list(_STYLES).index),
        "rank": dataclasses.asdict(info),
        "checks": [dataclasses.asdict(finding) for finding in findings],
        "tuning": [
            {**dataclasses.asdict(choice.setting), "applied": choice.applied, "kept": choice.kept} for choice in choices
        ],
    }


def lines(findings: Sequence[Finding], choices: Sequence[Choice]) -> list[str]:
    """Give the report as plain lines."""
    text = []
    for finding in findings:
        text.append(f"{finding.level:<8} {finding.name:<10} {finding.found}")
        text += [f"{'':<19} {part}" for part in _remarks(finding)]
    text.append("settings, in place before torch and MPI are loaded:")
    for choice in choices:
        text.append(f"{'set' if choice.applied else 'left':<8} {_headline(choice)}")
        text += [f"{'':<8} {part}" for part in _grounds(choice)]
    return text


def _remarks(finding: Finding) -> list[str]:
    return [part for part in (finding.why, f"mend: {finding.mend}" if finding.mend else "") if part]


def _headline(choice: Choice) -> str:
    setting = choice.setting
    return f"{setting.variable}={setting.value}" if choice.applied else f"{setting.variable}: {choice.kept}"


def _grounds(choice: Choice) -> list[str]:
    setting = choice.setting
    wish = "" if choice.applied else f"{setting.value} would be set: "
    return [f"because: {wish}{setting.reason}", f"effect: {setting.effect}"]


def _print_table(findings: Sequence[Finding], choices: Sequence[Choice]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        level = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(level, Text(finding.name), Text("\n".join([finding.found, *_remarks(finding)])))
    console.print(table)
    console.print(Text("\nSettings, in place before torch and MPI are loaded", style="bold"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for choice in choices:
        level = Text("set", style="green") if choice.applied else Text("left")
        table.add_row(level, Text("\n".join([_headline(choice), *_grounds(choice)])))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
