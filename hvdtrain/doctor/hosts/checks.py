"""The checks of several hosts: ssh, software, hardware, limits, folder, and those of `network_checks`. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter

from hvdtrain.doctor.facts.machine import UNLIMITED
from hvdtrain.doctor.hosts import network_checks
from hvdtrain.doctor.hosts.host_probe import HostReport
from hvdtrain.doctor.hosts.survey import Survey
from hvdtrain.doctor.report import Finding, by_value, known, known_cause, names
from hvdtrain.install.record import BUILD_COMMAND

_SAME = "install the same version on all hosts, or one environment on a file system that all hosts mount"
_FEW_FILES = 1024


def explain_ssh_failure(host: str, message: str) -> Finding:
    """Return the finding for a host that does not answer. ``message``: last lines of ssh, the shell or Python."""
    why, fix = known_cause("ssh", message)
    found = re.search(r"Offending \S+ key in (\S+?):\d+", message)
    key_file = f" -f {shlex.quote(found[1])}" if found else ""
    fix = fix.format(host=host, machine=host.rpartition("@")[2], key_file=key_file)
    parts = [part.strip() for part in message.split("; ") if part.strip(" @")]
    meaningful = [part for part in parts if not part.startswith(("Host key verification", "Please contact"))]
    return Finding(f"ssh {host}", "broken", (meaningful or parts or ["no message"])[-1], why, fix)


_VALUES: Mapping[str, Callable[[HostReport], object]] = {
    "python": lambda host: host.python.rpartition(".")[0],
    # name and release of the MPI: ``Open MPI 4.1.8`` from ``mpirun (Open MPI) 4.1.8``
    "mpirun": lambda host: host.mpirun.replace("mpirun (", "").replace(")", "").replace(" v", " "),
    "cores": attrgetter("host.cores"),
    "gpus": lambda host: ", ".join(f"{number} x {name}" for name, number in Counter(host.gpus).items()),
}
"""What hosts should share, where it is not the fact of that name."""


def reached(survey: Survey) -> list[Finding]:
    """List the hosts that answer, and those that do not, each with a fix."""
    found = [explain_ssh_failure(host, message) for host, message in survey.lost.items()]
    answering = [host for host in survey.slots if host not in survey.lost]
    return [Finding("hosts", "ok", names(answering)), *found] if answering else found


def compare(survey: Survey) -> list[Finding]:
    """Compare all hosts that answer. A value that no host has gives no finding."""
    found = []
    for line in known("differences"):
        name, minor = line["name"], line.get("minor", False)
        value = _VALUES.get(name, attrgetter(name))
        values = {host: value(facts) for host, facts in survey.facts.items()}
        if not any(values.values()):
            continue
        if len(set(map(str, values.values()))) == 1:
            everywhere = "" if len(values) == 1 else f" on all {len(values)} hosts"
            found.append(Finding(name, "ok", f"{by_value(values)}{everywhere}", minor=minor))
        else:
            fix = "" if line["level"] == "ok" else line.get("fix", _SAME).format(build=BUILD_COMMAND)
            found.append(Finding(name, line["level"], by_value(values), line["why"], fix))
    return found


def horovod_works(survey: Survey) -> list[Finding]:
    """Report hosts on which Horovod cannot run."""
    wrong = {host: facts.horovod_wrong for host, facts in survey.facts.items() if facts.horovod_wrong}
    return [Finding(f"horovod {host}", "broken", why, "", f"on {host}: {BUILD_COMMAND}") for host, why in wrong.items()]


def limits(survey: Survey) -> list[Finding]:
    """Check the limits of processes that ssh starts, which are also those of ranks."""
    files = {h: facts.limits.files for h, facts in survey.facts.items() if 0 <= facts.limits.files < _FEW_FILES}
    fabric = {host: facts.limits.locked_bytes for host, facts in survey.facts.items() if facts.host.fabric}
    locked = {host: limit for host, limit in fabric.items() if limit != UNLIMITED}
    found = []
    if files:
        why = "each rank opens a connection to every other rank, and data files"
        fix = "raise nofile in /etc/security/limits.conf on these hosts, then log in again"
        found.append(Finding("open files", "warning", by_value(files), why, fix))
    if locked:
        why = "InfiniBand and RoCE need locked memory: without it NCCL and UCX fail or use TCP"
        fix = "set memlock to unlimited in /etc/security/limits.conf on these hosts, and LimitMEMLOCK=infinity for sshd"
        found.append(Finding("locked memory", "warning", f"{by_value(locked)} bytes", why, fix))
    return found


def folder(survey: Survey) -> list[Finding]:
    """Check that all hosts have the working folder and share it."""
    where = survey.folder
    if not survey.facts:
        return []  # no host answers
    lacking = [host for host, facts in survey.facts.items() if not facts.folder]
    if lacking:
        why = f"it does not exist on {names(lacking)}, but ranks start in it"
        fix = f"mkdir -p {where} on these hosts, or start from a folder that all hosts have"
        return [Finding("folder", "broken", where, why, fix)]
    if not survey.writer:
        why = "no host can write there: runs and checkpoints could not be saved"
        return [Finding("folder", "broken", where, why, "start from a writable folder")]
    blind = [host for host, sees in survey.sees_file.items() if not sees]
    if blind:
        why = (
            f"{names(blind)} cannot see what {survey.writer} writes there; the run folder and its checkpoints are on "
            "rank 0's host, and you have to copy config, task and data to each host"
        )
        fix = "start from a folder that all hosts mount, or copy the files"
        return [Finding("folder", "warning", f"{where}, not shared", why, fix)]
    return [Finding("folder", "ok", f"{where}, {'shared' if len(survey.sees_file) > 1 else 'writable'}")]


def duplicate_hosts(survey: Survey) -> list[Finding]:
    """Warn of one host under two names."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for host, address in survey.addresses.items():
        hosts.setdefault((survey.facts[host].name, address), []).append(host)
    return [
        Finding("same host", "warning", names(found), f"they are all {name} at {address}", "name each host once")
        for (name, address), found in hosts.items()
        if len(found) > 1
    ]


CHECKS: tuple[Callable[[Survey], list[Finding]], ...] = (
    *(reached, duplicate_hosts, compare, horovod_works, limits, folder),
    *(network_checks.connections, network_checks.routes, network_checks.shared_addresses),
)


def examine(survey: Survey) -> list[Finding]:
    """Run all checks and return their findings."""
    return [finding for check in CHECKS for finding in check(survey)]
