"""``hvdtrain doctor --hosts a,b`` and ``--probe``: check several hosts and measure the links between them."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cli.launch_options import add_network
from hvdtrain.cli.parser import above_0, local
from hvdtrain.doctor.hosts.checks import examine
from hvdtrain.doctor.hosts.survey import Hosts
from hvdtrain.doctor.links.measured import Links, check_links
from hvdtrain.doctor.report import Report
from hvdtrain.errors import ConfigError
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.variables import FOUND_BY, passed_variables
from hvdtrain.runtime.environment import GLOO_LAUNCHER, NO_LAUNCHER, RankInfo, environ
from hvdtrain.runtime.mpi import check_launch

if TYPE_CHECKING:
    from hvdtrain.doctor.links.expected import Outlook


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
    from hvdtrain.doctor.links.start_probe import measure_links

    variables, hosts = environ(), parse_hosts(options.hosts)
    job = JobSpec(
        arguments=("doctor", "--probe", "--json"),
        ranks=sum(hosts.values()),
        nodes=len(hosts),
        hosts=hosts,
        host=platform.node(),
        python=sys.executable,
        folder=str(Path.cwd()),
        pass_on=tuple(name for name in (*FOUND_BY, *passed_variables(variables)) if name in variables),
        interface=options.interface,
        ssh_port=options.ssh_port,
        ssh_options=tuple(options.ssh_option),
        is_root=os.geteuid() == 0,
    )
    with Hosts(job, variables) as probes:
        survey = probes.survey()
        findings, links = examine(survey), None
        if options.probe:
            notes, links = measure_links(probes, job, variables, survey)
            findings += notes
    if links is None:
        return Report(findings)
    interface_mbit = {
        host: one.mbit for host in survey.facts if host in links.hosts and (one := survey.interface(host))
    }
    first = next(iter(survey.facts.values()))
    outlook = _outlook(options, links, max(hosts.values()), first.host.cores, on_cpu=not first.gpus)
    return Report([*findings, *check_links(links, interface_mbit)], links=links, outlook=outlook)


def probe_ranks(options: argparse.Namespace, info: RankInfo) -> Report | None:
    """Measure the links between the ranks of this job; None except on rank 0. Collective: yes.

    Errors:
        HvdtrainError: the ranks were not started by Horovod's MPI, mpi4py is missing, or --run is invalid.
    """
    from hvdtrain.doctor.links.start_probe import measure_ranks
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
    links = measure_ranks(info)
    if links is None:
        return None
    facts = read_host(environ())
    outlook = _outlook(options, links, info.local_size, facts.cores, on_cpu=not facts.gpus)
    return Report(check_links(links), links=links, outlook=outlook)


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
