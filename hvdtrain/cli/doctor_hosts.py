"""``hvdtrain doctor --hosts a,b`` and ``--probe``: several hosts, the links between them, and what they allow."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.launch_parser import add_network
from hvdtrain.doctor.finding import LEVELS, Finding, worst
from hvdtrain.doctor.hosts.checks import examine
from hvdtrain.doctor.hosts.survey import Ask, Hosts, Survey, asked
from hvdtrain.doctor.links import by_tcp
from hvdtrain.doctor.links import link_table as table
from hvdtrain.doctor.links.measured import Links, judge
from hvdtrain.doctor.report import summary, told
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.launch.hosts import LOCAL_NAMES, parse_hosts
from hvdtrain.runtime.environment import GLOO_LAUNCHER, NO_LAUNCHER, RankInfo, environ
from hvdtrain.runtime.mpi import check_launch

if TYPE_CHECKING:
    from hvdtrain.doctor.links.expected import Outlook


@dataclass
class Report:
    """What is printed."""

    findings: list[Finding] = field(default_factory=list)
    links: Links | None = None
    outlook: Outlook | None = None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    several = parser.add_argument_group("several hosts")
    several.add_argument("--hosts", metavar="a:4,b:4", help="ask these by ssh too, and compare them; ranks of each (1)")
    add_network(several.add_argument)
    links = parser.add_argument_group("links, of --hosts or of the ranks that a launcher has started")
    links.add_argument("--probe", action="store_true", help="measure bandwidth and latency of all pairs of hosts")
    links.add_argument("--run", type=Path, metavar="RUN", help="say what a step of this run would take on more ranks")
    links.add_argument("--model_parameters", type=_count, metavar="15e6", help="so of a model, with --step_ms")
    links.add_argument("--step_ms", type=_positive, metavar="X", help="of one rank, computing alone")


def check_options(options: argparse.Namespace) -> None:
    """Refuse what does not go together.

    Errors:
        ConfigError: an option without another that it needs.
    """
    model = options.model_parameters is not None
    if model != (options.step_ms is not None):
        raise ConfigError("--model_parameters and --step_ms go together.", next_step="give both, or --run RUN alone")
    if model and options.run:
        raise ConfigError("--run tells what --model_parameters and --step_ms say.", next_step="leave these away")
    if (model or options.run) and not options.probe:
        raise ConfigError("What to expect follows from the links.", next_step="add --probe")


def look(options: argparse.Namespace) -> Report:
    """Ask all hosts of ``--hosts``.

    Errors:
        HvdtrainError: hosts or a run that cannot be.
    """
    ask = Ask(
        hosts=parse_hosts(options.hosts),
        local=frozenset({*LOCAL_NAMES, platform.node()}),
        folder=str(Path.cwd()),
        python=sys.executable,
        environment=environ(),
        ssh_port=options.ssh_port,
        ssh_options=tuple(options.ssh_option),
    )
    with asked(ask) as hosts:
        survey = hosts.survey()
        report = Report(examine(survey))
        if options.probe:
            _probe(report, options, ask, survey, hosts)
    if report.links is not None:
        plugs = {host: _plug(survey, host) for host in report.links.hosts if host in survey.says}
        report.findings += judge(report.links, plugs)
        said = next(iter(survey.says.values()))
        per_host = max(ask.hosts.values())
        report.outlook = _outlook(options, report.links, per_host, said.cores, on_cpu=not said.gpus)
    return report


def probe(options: argparse.Namespace, info: RankInfo) -> Report:
    """Measure between the ranks that a launcher has started; on rank 0 what was found. Collective: yes.

    Errors:
        HvdtrainError: no launcher of the MPI that Horovod speaks, no mpi4py, or a run that cannot be.
    """
    from hvdtrain.doctor.links import by_mpi
    from hvdtrain.runtime.host import read_host

    if info.launcher == NO_LAUNCHER:
        raise ConfigError(
            "--probe measures between hosts or ranks, and there is one process.",
            next_step="hvdtrain doctor --hosts a,b --probe, or under mpirun: python -m hvdtrain doctor --probe",
        )
    if info.launcher == GLOO_LAUNCHER:
        raise ConfigError(
            "--probe measures by MPI, and these ranks were started without.",
            next_step="start it by mpirun, or once: hvdtrain doctor --hosts a,b --probe",
        )
    check_launch(info)
    links = by_mpi.measure(info)
    if links is None:
        return Report()
    facts = read_host(environ())
    outlook = _outlook(options, links, info.local_size, facts.cores, on_cpu=not facts.gpus)
    return Report(judge(links), links, outlook)


def show(report: Report, *, as_json: bool) -> int:
    """Print it; the exit status."""
    if as_json:
        print(json.dumps(data(report)))
        return worst(report.findings)
    print("\n".join(told(report.findings)))
    if report.links is not None:
        print("\n".join(["", *table.lines(report.links)]))
    if report.outlook is not None:
        from hvdtrain.doctor.links.expected import lines

        print("\n".join(["", *lines(report.outlook)]))
    print(f"\n{summary(report.findings)}")
    return worst(report.findings)


def data(report: Report) -> dict[str, Any]:
    """All of it as one object; ``format`` changes when a name in it does."""
    found: dict[str, Any] = {
        "format": 1,
        "level": LEVELS[worst(report.findings)],
        "checks": [asdict(finding) for finding in report.findings],
    }
    if report.links is not None:
        found["links"] = report.links.as_data()
    if report.outlook is not None:
        found["outlook"] = report.outlook.as_data()
    return found


def _probe(report: Report, options: argparse.Namespace, ask: Ask, survey: Survey, hosts: Hosts) -> None:
    """Measure by MPI where that can be, by TCP elsewhere."""
    from hvdtrain.doctor.links import start_probe as start

    names = _reachable(survey)
    left_out = [host for host in survey.slots if host not in names]
    if left_out:
        there, why = f"without {', '.join(left_out)}", "what cannot be reached cannot be measured"
        report.findings.append(Finding("probe", "warning", there, why, "mend what is broken above, then once more"))
    if not names or (len(names) == 1 and left_out):
        return
    why = start.cannot(survey, names)
    if not why:
        try:
            report.links = start.measure(ask, names, options.interface or start.network(survey, names))
            return
        except HvdtrainError as error:
            mend = error.next_step or ""
            why = f"{error.what} {error.found or ''}".strip()
            report.findings.append(Finding("probe", "warning", why, "links are measured by TCP instead", mend))
    else:
        report.findings.append(Finding("probe", "ok", "by TCP", why))
    if len(names) > 1:
        report.links = by_tcp.measure(hosts, names)


def _reachable(survey: Survey) -> list[str]:
    """Hosts that all others of them reach."""
    faulty = {host for host, there in survey.tried.items() for tried in there.values() if tried.fault}
    return [host for host in survey.tried if host not in faulty]


def _plug(survey: Survey, host: str) -> int:
    address = survey.addresses.get(host, "")
    return next((each.mbit for each in survey.says[host].interfaces if each.address == address), 0)


def _outlook(options: argparse.Namespace, links: Links, per_host: int, cores: int, *, on_cpu: bool) -> Outlook | None:
    if options.run is None and options.model_parameters is None:
        return None
    from hvdtrain.doctor.links.expected import of_model, outlook
    from hvdtrain.timeline.whatif.read_run import read_evidence

    if options.run is not None:
        return outlook(read_evidence(options.run), links, per_host)
    threads = max(1, cores // per_host)
    step_s = options.step_ms * 1e-3
    return outlook(of_model(options.model_parameters, step_s, cores, threads, on_cpu=on_cpu), links, per_host)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e15:
        raise argparse.ArgumentTypeError(f"a number above 0, not {text!r}")
    return number


def _count(text: str) -> int:
    return max(1, round(_positive(text)))
