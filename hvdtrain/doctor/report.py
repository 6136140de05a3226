"""The report of all findings, as text and as JSON: problems first, a count last. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from hvdtrain.doctor.finding import LEVELS, Finding, worst
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import Choice


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of the report: a mark such as a level, a name, a line of text, and remarks below it."""

    mark: str
    name: str
    text: str
    remarks: tuple[str, ...] = ()


_RANK_FIELDS = ("launcher", "rank", "size", "local_rank", "local_size", "host")
"""The environment is left out because it may hold secrets."""


def as_json(info: RankInfo, findings: Sequence[Finding], choices: Sequence[Choice]) -> dict[str, object]:
    """Return the whole report for JSON. Raise ``format`` when a key changes."""
    return {
        "format": 1,
        "level": LEVELS[worst(findings)],
        "rank": {name: getattr(info, name) for name in _RANK_FIELDS},
        "checks": [finding.as_data() for finding in findings],
        "tuning": [
            {**dataclasses.asdict(choice.setting), "applied": choice.applied, "kept": choice.kept} for choice in choices
        ],
    }


def entries(findings: Sequence[Finding]) -> Iterator[Entry]:
    """Yield the findings, worst first. Minor findings without a problem share one entry that lists their names."""
    brief = [finding.name for finding in findings if finding.minor and finding.level == "ok"]
    for level in reversed(LEVELS):
        for finding in findings:
            if finding.level == level and not (finding.minor and level == "ok"):
                remarks = (finding.why, finding.fix and f"fix: {finding.fix}")
                yield Entry(level, finding.name, finding.found, tuple(filter(None, remarks)))
    if brief:
        yield Entry("ok", "also", f"{', '.join(brief)} (details: --json)")


def settings(choices: Sequence[Choice]) -> Iterator[Entry]:
    """Yield the settings made before torch and MPI are loaded, and those left as they were."""
    for choice in choices:
        setting = choice.setting
        preferred = "" if choice.applied else f"{setting.value} would be set: "
        yield Entry(
            "set" if choice.applied else "left",
            "",
            f"{setting.variable}={setting.value}" if choice.applied else f"{setting.variable}: {choice.kept}",
            (f"because: {preferred}{setting.reason}", f"effect: {setting.effect}"),
        )


def summary(findings: Sequence[Finding]) -> str:
    """Return one line with the number and the names of the problems."""
    broken = [finding.name for finding in findings if finding.level == "broken"]
    warnings = [finding.name for finding in findings if finding.level == "warning"]
    parts = [f"{len(broken)} broken: {', '.join(broken)}"] if broken else []
    if warnings:
        parts.append(f"{len(warnings)} warning{'s' * (len(warnings) > 1)}: {', '.join(warnings)}")
    return "; ".join(parts) or f"no problems: {len(findings)} checks"


def plain_lines(shown: Iterable[Entry]) -> Iterator[str]:
    """Yield entries as plain lines. Their texts begin in the same column."""
    rows = list(shown)
    width = max((len(entry.name) + 1 for entry in rows if entry.name), default=0)
    for entry in rows:
        yield f"{entry.mark:<8} {entry.name:<{width}}{entry.text}"
        yield from (f"{'':<{width + 9}}{remark}" for remark in entry.remarks)


def lines(findings: Sequence[Finding], choices: Sequence[Choice]) -> Iterator[str]:
    """Yield the report as plain lines."""
    yield from plain_lines(entries(findings))
    if choices:
        yield "settings made before torch and MPI are loaded:"
    yield from plain_lines(settings(choices))
    yield summary(findings)
