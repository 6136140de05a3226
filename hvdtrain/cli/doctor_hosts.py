"""``hvdtrain doctor --hosts a,b`` and ``--probe``: check several hosts and measure the links between them."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.launch_options import add_network
from hvdtrain.cli.parser import above_0, local
from hvdtrain.doctor.finding import LEVELS, Finding, worst
from hvdtrain.doctor.hosts.checks import examine
from hvdtrain.doctor.hosts.survey import Hosts, HostsRequest, Survey
from hvdtrain.doctor.links.measured import Links, check_links, link_table
from hvdtrain.doctor.report import entries, plain_lines, summary
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.launch.hosts import LOCAL_NAMES, parse_hosts
from hvdtrain.runtime.environment import GLOO_LAUNCHER, NO_LAUNCHER, RankInfo, environ
from hvdtrain.runtime.mpi import check_launch

if TYPE_CHECKING:
    from hvdtrain.doctor.links.expected import Outlook


@dataclass
class Report:
    """Findings, measured links, and predicted step times."""

    findings: list[Finding] = field(default_factory=list)
    links: Links | None = None
    outlook: Outlook | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    several = parser.add_argument_group("several hosts").add_argument
    hosts = "check and compare these hosts over ssh; HOST:N for N ranks (default: 1)"
    several("--hosts", metavar="a:4,b:4", help=hosts)
    add_network(several)
    title = "links between --hosts, or between the ranks that a launcher started"
    add = parser.add_argument_group(title).add_argument
    add("--probe", action="store_true", help="measure bandwidth and latency between all pairs of hosts")
    add("--run", type=local, metavar="RUN", help="predict the step time of this run on more ranks")
    parameters = "predict the step time of a model with N parameters on more ranks; needs --step_ms"
    add("--model_parameters", type=_count, metavar="N", help=parameters)
    add("--step_ms", type=above_0, metavar="X", help="milliseconds of a step on one rank")


def check_options(options: argparse.Namespace) -> None:
    """Raise ConfigError where an option needs another one, or excludes it."""
    model = options.model_parameters is not None
    if model != (options.step_ms is not None):
        what = "--model_parameters and --step_ms must be given together"
        raise ConfigError(what, next_step="give both, or only --run RUN")
    if model and options.run:
        raise ConfigError(
            "--run and --model_parameters cannot be given together",
            next_step="remove --run, or remove --model_parameters and --step_ms",
        )
    if (model or options.run) and not options.probe:
        what = "--run and --model_parameters need --probe, which measures the links"
        raise ConfigError(what, next_step="add --probe")


def check_hosts(options: argparse.Namespace) -> Report:
    """Check all hosts of ``--hosts``.

    Errors:
        HvdtrainError: --hosts or --run is invalid.
    """
    request = HostsRequest(
        hosts=parse_hosts(options.hosts),
        local=frozenset({*LOCAL_NAMES, platform.node()}),
        folder=str(Path.cwd()),
        python=sys.executable,
        environment=environ(),
        ssh_port=options.ssh_port,
        ssh_options=tuple(options.ssh_option),
    )
    with Hosts(request) as hosts:
        survey = hosts.survey()
        report = Report(examine(survey))
        if options.probe:
            _probe(report, options, request, survey, hosts)
    if report.links is not None:
        interface_mbit = {host: _interface_mbit(survey, host) for host in report.links.hosts if host in survey.facts}
        report.findings += check_links(report.links, interface_mbit)
        first = next(iter(survey.facts.values()))
        per_host = max(request.hosts.values())
        report.outlook = _outlook(options, report.links, per_host, first.cores, on_cpu=not first.gpus)
    return report


def probe_ranks(options: argparse.Namespace, info: RankInfo) -> Report:
    """Measure the links between the ranks of this job. The report is empty except on rank 0. Collective: yes.

    Errors:
        HvdtrainError: the ranks were not started by Horovod's MPI, mpi4py is missing, or --run is invalid.
    """
    from hvdtrain.doctor.links import by_mpi
    from hvdtrain.runtime.host import read_host

    if info.launcher == NO_LAUNCHER:
        raise ConfigError(
            "--probe measures links between hosts or ranks, but this is a single process.",
            next_step="hvdtrain doctor --hosts a,b --probe, or under mpirun: python -m hvdtrain doctor --probe",
        )
    if info.launcher == GLOO_LAUNCHER:
        raise ConfigError(
            "--probe needs MPI, but these ranks were started without it.",
            next_step="start the ranks with mpirun, or run once: hvdtrain doctor --hosts a,b --probe",
        )
    check_launch(info)
    links = by_mpi.measure(info)
    if links is None:
        return Report()
    facts = read_host(environ())
    outlook = _outlook(options, links, info.local_size, facts.cores, on_cpu=not facts.gpus)
    return Report(check_links(links), links, outlook)


def show(report: Report, *, as_json: bool) -> int:
    """Print the report and return the exit status."""
    if as_json:
        print(json.dumps(data(report)))
        return worst(report.findings)
    print("\n".join(plain_lines(entries(report.findings))))
    if report.links is not None:
        print("\n".join(["", *link_table(report.links)]))
    if report.outlook is not None:
        from hvdtrain.doctor.links.expected import lines

        print("\n".join(["", *lines(report.outlook)]))
    print(f"\n{summary(report.findings)}")
    return worst(report.findings)


def data(report: Report) -> dict[str, Any]:
    """Return the report for JSON. Raise ``format`` when a key changes."""
    content: dict[str, Any] = {
        "format": 1,
        "level": LEVELS[worst(report.findings)],
        "checks": [finding.as_data() for finding in report.findings],
    }
    if report.links is not None:
        content["links"] = report.links.as_data()
    if report.outlook is not None:
        content["outlook"] = asdict(report.outlook)
    return content


def _probe(report: Report, options: argparse.Namespace, request: HostsRequest, survey: Survey, hosts: Hosts) -> None:
    """Measure with MPI if possible, else with TCP."""
    from hvdtrain.doctor.links import start_probe as start

    names = _reachable(survey)
    left_out = [host for host in survey.slots if host not in names]
    if left_out:
        found, why = f"not measured: {', '.join(left_out)}", "not all other hosts reach them"
        fix = "fix the broken findings above, then run it again"
        report.findings.append(Finding("probe", "warning", found, why, fix))
    if not names or (len(names) == 1 and left_out):
        return
    why = start.obstacle(survey, names)
    if not why:
        try:
            interface = options.interface or start.common_interface(survey, names)
            report.links = start.measure_by_mpi(request, names, interface)
            return
        except HvdtrainError as error:
            found = f"{error.what} {error.found or ''}".strip()
            why = "links are measured with TCP instead of MPI"
            report.findings.append(Finding("probe", "warning", found, why, error.next_step or ""))
    else:
        report.findings.append(Finding("probe", "ok", "measured with TCP", why))
    if len(names) > 1:
        report.links = start.measure_by_tcp(hosts, names)


def _reachable(survey: Survey) -> list[str]:
    """Return the hosts that reach all others."""
    faulty = {host for host, attempts in survey.attempts.items() for attempt in attempts.values() if attempt.fault}
    return [host for host in survey.attempts if host not in faulty]


def _interface_mbit(survey: Survey, host: str) -> int:
    address = survey.addresses.get(host, "")
    return next((each.mbit for each in survey.facts[host].interfaces if each.address == address), 0)


def _outlook(options: argparse.Namespace, links: Links, per_host: int, cores: int, *, on_cpu: bool) -> Outlook | None:
    if options.run is None and options.model_parameters is None:
        return None
    from hvdtrain.doctor.links.expected import assumed_run, outlook
    from hvdtrain.timeline.whatif.read_run import read_evidence

    if options.run is not None:
        return outlook(read_evidence(options.run), links, per_host)
    threads = max(1, cores // per_host)
    step_s = options.step_ms * 1e-3
    return outlook(assumed_run(options.model_parameters, step_s, cores, threads, on_cpu=on_cpu), links, per_host)


def _count(text: str) -> int:
    return max(1, round(above_0(text)))
