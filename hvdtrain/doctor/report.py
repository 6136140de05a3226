"""The report of all findings, as text and as JSON: problems first, a count last. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain.errors import listed
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.tuning import Choice

Level = Literal["ok", "warning", "broken"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "broken")
"""Levels from best to worst. The index is the exit status."""
_MOST_NAMES = 6


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str  # of the check
    level: Level  # broken: training cannot run; warning: it runs slower, or with fewer features
    found: str  # the facts
    why: str = ""  # what is wrong and why it matters, or a note
    fix: str = ""  # the command or the change that fixes it
    minor: bool = False  # while the level is ok, the report shows the name only

    def as_data(self) -> dict[str, Any]:
        """Return the finding as in the JSON report, where ``mend`` is the key of the fix."""
        return {"mend" if name == "fix" else name: value for name, value in vars(self).items()}


def known(what: str) -> list[dict[str, Any]]:
    """Return rows of causes.json, which needs no package: one may be missing. The first pattern that is found counts.

    Of variables, the values in `harmful` are harmful; without these, all but `harmless`, by default off.
    """
    return list(json.loads(Path(__file__).with_name("causes.json").read_text("utf-8"))[what])


def known_cause(program: str, message: str) -> tuple[str, str]:
    """Return the cause of a message of a program in causes.json, and the fix; empty texts if it is not known."""
    rows = (each for each in known(program) if re.search(each["pattern"], message))
    return next(((each["cause"], each["fix"]) for each in rows), ("", ""))


def worst(findings: Iterable[Finding]) -> int:
    """Return the exit status: 0 no problem, 1 warnings, 2 something is broken."""
    return max((LEVELS.index(finding.level) for finding in findings), default=0)


def names(hosts: Iterable[str]) -> str:
    """Join names, shortened as in ``a, b and 3 more``."""
    return listed(hosts, _MOST_NAMES)


def by_value(values: Mapping[str, object]) -> str:
    """Group hosts by value, most frequent first: ``2.13 on a, b; 2.12 on c``. A common value has no hosts."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(str(value) or "none", []).append(host)
    if len(hosts) == 1:
        return next(iter(hosts))
    most_first = sorted(hosts.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {names(where)}" for value, where in most_first)


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
        """Yield the report as lines. Minor findings without a problem share one, which lists their names."""
        rows: list[_Row] = []
        for level in reversed(LEVELS):
            for one in self.findings:
                if one.level == level and not (one.minor and level == "ok"):
                    rows.append((level, one.name, one.found, [one.why, one.fix and f"fix: {one.fix}"]))
        if brief := [one.name for one in self.findings if one.minor and one.level == "ok"]:
            rows.append(("ok", "also", f"{', '.join(brief)} (details: --json)", []))
        yield from _lines(rows)
        if self.choices:
            yield "settings made before torch and MPI are loaded:"
        yield from _lines([_setting(choice) for choice in self.choices])
        if self.info is None:
            yield ""
        yield summary(self.findings)


_Row = tuple[str, str, str, Sequence[str]]
"""A mark such as a level, a name, a text, and remarks below it."""


def _lines(rows: Sequence[_Row]) -> Iterator[str]:
    """Yield lines with texts that begin in the same column."""
    width = max((len(name) + 1 for _, name, _, _ in rows if name), default=0)
    for mark, name, text, remarks in rows:
        yield f"{mark:<8} {name:<{width}}{text}"
        yield from (f"{'':<{width + 9}}{remark}" for remark in remarks if remark)


def _setting(choice: Choice) -> _Row:
    """Return a setting, made or left as it was."""
    setting = choice.setting
    mark, text, preferred = "set", f"{setting.variable}={setting.value}", ""
    if not choice.applied:
        mark, text, preferred = "left", f"{setting.variable}: {choice.kept}", f"{setting.value} would be set: "
    return mark, "", text, (f"because: {preferred}{setting.reason}", f"effect: {setting.effect}")


def summary(findings: Sequence[Finding]) -> str:
    """Return one line with the number and the names of the problems."""
    broken = [finding.name for finding in findings if finding.level == "broken"]
    warnings = [finding.name for finding in findings if finding.level == "warning"]
    parts = [f"{len(broken)} broken: {', '.join(broken)}"] if broken else []
    if warnings:
        parts.append(f"{len(warnings)} warning{'s' * (len(warnings) > 1)}: {', '.join(warnings)}")
    return "; ".join(parts) or f"no problems: {len(findings)} checks"
