"""``hvdtrain doctor``: check the installation, this machine and other hosts; show the settings that hvdtrain chooses.

``--hosts a,b`` and ``--probe`` check several hosts and measure the links between them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cli.launch_options import add_network
from hvdtrain.cli.parser import Parser, above_0, local
from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts import gather
from hvdtrain.doctor.facts.machine import network
from hvdtrain.doctor.finding import LEVELS, worst
from hvdtrain.doctor.hosts.checks import examine as examine_hosts
from hvdtrain.doctor.hosts.survey import Hosts
from hvdtrain.doctor.links.measured import Links, check_links
from hvdtrain.doctor.nccl_log import NcclLog
from hvdtrain.doctor.report import Entry, Report, entries, settings, summary
from hvdtrain.doctor.site_proposal import SiteFacts, propose_site, scheduler
from hvdtrain.errors import ConfigError, HvdtrainError, LaunchError
from hvdtrain.files import create_text, open_regular
from hvdtrain.launch.detect import detect_machine
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.variables import FOUND_BY, passed_variables
from hvdtrain.runtime.environment import GLOO_LAUNCHER, NO_LAUNCHER, RankInfo, environ
from hvdtrain.runtime.mpi import check_launch
from hvdtrain.runtime.tuning import prepare, without_our_variables

if TYPE_CHECKING:
    from hvdtrain.doctor.links.expected import Outlook


_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red", "set": "green", "left": ""}


def parser() -> Parser:
    """Declare the options."""
    made = Parser(
        prog="hvdtrain doctor",
        description="Check this machine and installation: versions, the build of Horovod, MPI, launcher, GPUs, "
        "network, limits, run folder, and the settings that hvdtrain chooses. Each problem is shown with its fix. "
        "Under a launcher, rank 0 reports. Exit code: 0 no problem, 1 warnings, 2 something is broken.",
    )
    add = made.add_argument
    add("--json", action="store_true", help="print the report as one JSON object")
    add("--run_dir", metavar="DIR", type=local, default=Path("runs"), help="folder of the runs (default: runs)")
    add("--nccl_log", metavar="FILE", type=local, help="also check this log, which NCCL wrote with NCCL_DEBUG=INFO")
    site = "propose a profile of this site for hvdtrain launch --site, in a new file NAME.yaml, and check nothing"
    add("--write-site", metavar="FILE", type=local, help=site)
    _add_hosts(made)
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand and return its exit status: 0 no problem, 1 warnings, 2 something is broken."""
    options = parser().parse_args(argv)
    try:
        found = _examine(options)
    except HvdtrainError as error:
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}")
        return 2

    if found is None:
        return 0
    if options.json:
        print(json.dumps(found.as_data()))
    elif found.info is not None and sys.stdout.isatty():
        _print_table(found)
    else:
        print("\n".join(found.lines()))
    return worst(found.findings)


def _examine(options: argparse.Namespace) -> Report | None:
    """Return the report; None if there is nothing to show: on ranks other than 0, and after `_write_site`."""
    _check_hosts_options(options)
    if options.write_site and (options.hosts or options.probe):
        raise ConfigError("--write-site describes this host", next_step="omit --hosts and --probe")
    if options.hosts:
        return _check_hosts(options)
    log = _read_log(options.nccl_log) if options.nccl_log else None
    refusal: LaunchError | None = None
    try:
        info, choices = prepare()
    except LaunchError as error:  # the launcher's variables are inconsistent
        if options.probe:  # which needs ranks
            raise
        info, choices, refusal = RankInfo(host=platform.node()), [], error
    if options.probe:
        return _probe_ranks(options, info)
    if info.rank != 0:
        return None
    if options.write_site:
        _write_site(options.write_site)
        return None
    return Report(examine(gather(info, environ(), options.run_dir, log, refusal)), info, choices)


def _write_site(path: Path) -> None:
    """Write the proposed profile. Errors: ConfigError: it is not NAME.yaml, exists, or cannot be written."""
    if path.suffix != ".yaml":
        raise ConfigError(f"--write-site {path} is not the name of a profile", expected="NAME.yaml")
    now = without_our_variables(environ())
    text = propose_site(SiteFacts(now, scheduler(now), detect_machine(now), network()))
    try:
        create_text(path, text)
    except OSError as error:
        next_step = "name a new file" if isinstance(error, FileExistsError) else None
        raise ConfigError(f"--write-site {path}: {error.strerror}", next_step=next_step) from error
    print(f"wrote {path}: check it, then: hvdtrain launch --site {shlex.quote(str(path))} --dry-run ...")


def _read_log(path: Path) -> NcclLog:
    try:
        with io.TextIOWrapper(open_regular(path), errors="replace") as file:
            return NcclLog(file, str(path))
    except OSError as error:
        what, expected = f"--nccl_log {path} cannot be read.", "the output of a job with NCCL_DEBUG=INFO"
        raise ConfigError(what, expected=expected, found=error.strerror) from error


def _print_table(found: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def show(some: Iterable[Entry]) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for entry in some:
            name = [Text(entry.name)] if entry.name else []
            text = Text("\n".join([entry.text, *entry.remarks]))
            table.add_row(Text(entry.mark, style=_STYLES[entry.mark]), *name, text)
        console.print(table)

    show(entries(found.findings))
    if found.choices:
        console.print(Text("\nSettings made before torch and MPI are loaded", style="bold"))
        show(settings(found.choices))
    console.print(Text("\n" + summary(found.findings), style=_STYLES[LEVELS[worst(found.findings)]]))


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Declare the options for several hosts."""
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


def _check_hosts_options(options: argparse.Namespace) -> None:
    """Raise ConfigError where an option needs another one, or excludes it."""
    model = options.model_parameters is not None
    if model != (options.step_ms is not None):
        what = "--model_parameters and --step_ms must be given together"
        raise ConfigError(what, next_step="give both, or only --run RUN")
    if model and options.run:
        what = "--run and --model_parameters cannot be given together"
        raise ConfigError(what, next_step="remove --run, or remove --model_parameters and --step_ms")
    if (model or options.run) and not options.probe:
        what = "--run and --model_parameters need --probe, which measures the links"
        raise ConfigError(what, next_step="add --probe")


def _check_hosts(options: argparse.Namespace) -> Report:
    """Check all hosts of ``--hosts``. Errors: HvdtrainError: --hosts or --run is invalid."""
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
        findings, links = examine_hosts(survey), None
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


def _probe_ranks(options: argparse.Namespace, info: RankInfo) -> Report | None:
    """Measure the links between the ranks of this job; None except on rank 0. Collective: yes.

    Errors: HvdtrainError: the ranks were not started by Horovod's MPI, mpi4py is missing, or --run is invalid.
    """
    from hvdtrain.doctor.links.start_probe import measure_ranks
    from hvdtrain.runtime.host import read_host

    if info.launcher == NO_LAUNCHER:
        raise ConfigError(
            "--probe measures links between hosts or ranks, but this is a single process.",
            next_step="hvdtrain doctor --hosts a,b --probe, or under mpirun: python -m hvdtrain doctor --probe",
        )
    if info.launcher == GLOO_LAUNCHER:
        next_step = "start the ranks with mpirun, or run once: hvdtrain doctor --hosts a,b --probe"
        raise ConfigError("--probe needs MPI, but these ranks were started without it.", next_step=next_step)
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
