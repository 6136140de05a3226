"""The checks of several hosts. Each is one line in `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.hosts import comparisons, network_checks
from hvdtrain.doctor.hosts.host_text import names
from hvdtrain.doctor.hosts.ssh_errors import explain_ssh_failure
from hvdtrain.doctor.hosts.survey import Survey


def reached(survey: Survey) -> list[Finding]:
    """List the hosts that answer, and those that do not, each with a fix."""
    found = [explain_ssh_failure(host, message) for host, message in survey.lost.items()]
    answering = [host for host in survey.slots if host not in survey.lost]
    return [Finding("hosts", "ok", names(answering)), *found] if answering else found


CHECKS: tuple[Callable[[Survey], list[Finding]], ...] = (
    reached,
    comparisons.duplicate_hosts,
    comparisons.compare,
    comparisons.horovod_works,
    comparisons.limits,
    comparisons.folder,
    network_checks.clocks,
    network_checks.connections,
    network_checks.routes,
    network_checks.shared_addresses,
)


def examine(survey: Survey) -> list[Finding]:
    """Run all checks and return their findings."""
    return [finding for check in CHECKS for finding in check(survey)]
