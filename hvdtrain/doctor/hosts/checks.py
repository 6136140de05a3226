"""The checks of several hosts: a line in `CHECKS` each."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.hosts import alike, network_checks, ssh_words
from hvdtrain.doctor.hosts.host_text import names
from hvdtrain.doctor.hosts.survey import Survey


def reached(survey: Survey) -> list[Finding]:
    """Name the hosts that cannot be asked, each with what mends that."""
    found = [ssh_words.lost(host, said) for host, said in survey.lost.items()]
    there = [host for host in survey.slots if host not in survey.lost]
    return [Finding("hosts", "ok", names(there)), *found] if there else found


CHECKS: tuple[Callable[[Survey], list[Finding]], ...] = (
    reached,
    alike.twice,
    alike.alike,
    alike.horovod_there,
    alike.limits,
    alike.folder,
    network_checks.clocks,
    network_checks.ways,
    network_checks.routes,
    network_checks.impostors,
)


def examine(survey: Survey) -> list[Finding]:
    """Run all checks."""
    return [finding for check in CHECKS for finding in check(survey)]
