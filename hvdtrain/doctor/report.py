"""What the checks found, as text and as JSON: what is wrong first, and how many at the end. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from hvdtrain.doctor.finding import LEVELS, Finding, Level, worst
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import Choice


@dataclasses.dataclass(frozen=True)
class Entry:
    """What stands together: a mark such as a level, a name, a line, and remarks below it."""

    mark: str
    name: str
    text: str
    remarks: tuple[str, ...] = ()


_OF_RANK = ("launcher", "rank", "size", "local_rank", "local_size", "host")
"""Not its environment, which holds secrets."""


def as_json(info: RankInfo, findings: Sequence[Finding], choices: Sequence[Choice]) -> dict[str, object]:
    """Give all that is printed as one object; ``format`` changes when a name in it does."""
    return {
        "format": 1,
        "level": LEVELS[worst(findings)],
        "rank": {name: value for name, value in vars(info).items() if name in _OF_RANK},
        "checks": [dataclasses.asdict(finding) for finding in findings],
        "tuning": [
            {**dataclasses.asdict(choice.setting), "applied": choice.applied, "kept": choice.kept} for choice in choices
        ],
    }


def entries(findings: Sequence[Finding]) -> Iterator[Entry]:
    """Order findings: what is wrong, worst first, what is well, and by their names alone what is well and minor."""
    brief = [finding.name for finding in findings if finding.minor and finding.level == "ok"]
    for level in reversed(LEVELS):
        for finding in findings:
            if finding.level == level and not (finding.minor and level == "ok"):
                mend = (f"mend: {finding.mend}",) if finding.mend else ()
                yield Entry(level, finding.name, finding.found, (finding.why,) * bool(finding.why) + mend)
    if brief:
        yield Entry("ok", "also", f"{', '.join(brief)} (what was found: --json)")


def settings(choices: Sequence[Choice]) -> Iterator[Entry]:
    """Say what was set before torch and MPI are loaded, and what was left."""
    for choice in choices:
        setting = choice.setting
        wish = "" if choice.applied else f"{setting.value} would be set: "
        yield Entry(
            "set" if choice.applied else "left",
            "",
            f"{setting.variable}={setting.value}" if choice.applied else f"{setting.variable}: {choice.kept}",
            (f"because: {wish}{setting.reason}", f"effect: {setting.effect}"),
        )


def summary(findings: Sequence[Finding]) -> str:
    """Say in one line how many things are wrong, and which."""
    wrong: dict[Level, list[str]] = {level: [] for level in reversed(LEVELS)}
    for finding in findings:
        wrong[finding.level].append(finding.name)
    broken, warnings = wrong["broken"], wrong["warning"]
    parts = [f"{len(broken)} broken: {', '.join(broken)}"] if broken else []
    if warnings:
        parts.append(f"{len(warnings)} warning{'s' * (len(warnings) > 1)}: {', '.join(warnings)}")
    return "; ".join(parts) or f"all is well: {len(findings)} checks"


def told(findings: Sequence[Finding]) -> Iterator[str]:
    """Give findings as plain lines."""
    wide = max((len(entry.name) for entry in entries(findings)), default=0)
    for entry in entries(findings):
        yield f"{entry.mark:<8} {entry.name:<{wide}} {entry.text}"
        yield from (f"{'':<{wide + 9}} {remark}" for remark in entry.remarks)


def lines(findings: Sequence[Finding], choices: Sequence[Choice]) -> Iterator[str]:
    """Give the report as plain lines."""
    yield from told(findings)
    if choices:
        yield "settings, in place before torch and MPI are loaded:"
    for entry in settings(choices):
        yield f"{entry.mark:<8} {entry.text}"
        yield from (f"{'':<8} {remark}" for remark in entry.remarks)
    yield summary(findings)
