"""The report of all findings, as text and as JSON: problems first, a count last. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.doctor.finding import LEVELS, Finding, worst
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import Choice

_RANK_FIELDS = ("launcher", "rank", "size", "local_rank", "local_size", "host")
"""The environment is left out because it may hold secrets."""


@dataclass(frozen=True)
class Report:
    """Findings about one host or several, and the settings of this process."""

    findings: Sequence[Finding]
    info: RankInfo | None = None  # of this process; None if several hosts were checked
    choices: Sequence[Choice] = ()  # settings of this process

    def as_data(self) -> dict[str, Any]:
        """Return the report for JSON. Raise ``format`` when a key changes."""
        tuning = [{**asdict(one.setting), "applied": one.applied, "kept": one.kept} for one in self.choices]
        parts = {
            "format": 1,
            "level": LEVELS[worst(self.findings)],
            "rank": self.info and {name: getattr(self.info, name) for name in _RANK_FIELDS},
            "checks": [finding.as_data() for finding in self.findings],
            "tuning": self.info and tuning,
        }
        return {key: part for key, part in parts.items() if part is not None}

    def lines(self) -> Iterator[str]:
        """Yield the report as plain lines."""
        yield from plain_lines(entries(self.findings))
        if self.choices:
            yield "settings made before torch and MPI are loaded:"
        yield from plain_lines(settings(self.choices))
        if self.info is None:
            yield ""
        yield summary(self.findings)


@dataclass(frozen=True)
class Entry:
    """One entry of the report: a mark such as a level, a name, a line of text, and remarks below it."""

    mark: str
    name: str
    text: str
    remarks: tuple[str, ...] = ()


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
        mark, text, preferred = "set", f"{setting.variable}={setting.value}", ""
        if not choice.applied:
            mark, text, preferred = "left", f"{setting.variable}: {choice.kept}", f"{setting.value} would be set: "
        yield Entry(mark, "", text, (f"because: {preferred}{setting.reason}", f"effect: {setting.effect}"))


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
