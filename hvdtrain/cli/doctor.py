"""``hvdtrain doctor``: check the installation and this machine, and show the settings that hvdtrain chooses."""

from __future__ import annotations

import argparse
import io
import json
import platform
import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from hvdtrain.cli import doctor_hosts
from hvdtrain.cli.parser import Parser, local
from hvdtrain.doctor import report
from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts import gather
from hvdtrain.doctor.facts.machine import network
from hvdtrain.doctor.finding import LEVELS, worst
from hvdtrain.doctor.nccl_log import NcclLog, read_nccl_log
from hvdtrain.doctor.site_proposal import SiteFacts, propose_site, scheduler
from hvdtrain.errors import ConfigError, HvdtrainError, LaunchError
from hvdtrain.files import create_text, open_regular
from hvdtrain.launch.detect import detect_machine
from hvdtrain.runtime.environment import RankInfo, environ
from hvdtrain.runtime.tuning import Choice, prepare, without_our_variables

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
    doctor_hosts.add_options(made)
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand and return its exit status: 0 no problem, 1 warnings, 2 something is broken."""
    options = parser().parse_args(argv)
    try:
        found = _examine(options)
    except HvdtrainError as error:
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("hvdtrain: interrupted\n")
        return 128 + signal.SIGINT
    if found is None:
        return 0
    if options.json:
        print(json.dumps(found.as_data()))
    elif found.info is not None and sys.stdout.isatty():
        _print_table(found)
    else:
        print("\n".join(found.lines()))
    return worst(found.findings)


def _examine(options: argparse.Namespace) -> report.Report | None:
    """Return the report; None if there is nothing to show: on ranks other than 0, and after `_write_site`."""
    doctor_hosts.check_options(options)
    if options.write_site and (options.hosts or options.probe):
        raise ConfigError("--write-site describes this host", next_step="omit --hosts and --probe")
    if options.hosts:
        return doctor_hosts.check_hosts(options)
    log = _read(options.nccl_log) if options.nccl_log else None
    info, choices, refusal = _prepare(options)
    if options.probe:
        return doctor_hosts.probe_ranks(options, info)
    if info.rank != 0:
        return None
    if options.write_site:
        _write_site(options.write_site)
        return None
    return report.Report(examine(gather(info, environ(), options.run_dir, log, refusal)), info, choices)


def _prepare(options: argparse.Namespace) -> tuple[RankInfo, Sequence[Choice], LaunchError | None]:
    """Return the rank, the settings, and the error of the launcher's variables, if they are inconsistent.

    Errors:
        LaunchError: they are inconsistent, and --probe needs ranks.
    """
    try:
        return *prepare(), None
    except LaunchError as error:
        if options.probe:
            raise
        return RankInfo(host=platform.node()), (), error


def _write_site(path: Path) -> None:
    """Write the proposed profile.

    Errors:
        ConfigError: the file exists, has another name than NAME.yaml, or cannot be written.
    """
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


def _read(path: Path) -> NcclLog:
    try:
        with io.TextIOWrapper(open_regular(path), errors="replace") as file:
            return read_nccl_log(file, str(path))
    except OSError as error:
        raise ConfigError(
            f"--nccl_log {path} cannot be read.",
            expected="the output of a job with NCCL_DEBUG=INFO",
            found=error.strerror,
        ) from error


def _print_table(found: report.Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def show(entries: Iterable[report.Entry]) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for entry in entries:
            name = [Text(entry.name)] if entry.name else []
            text = Text("\n".join([entry.text, *entry.remarks]))
            table.add_row(Text(entry.mark, style=_STYLES[entry.mark]), *name, text)
        console.print(table)

    show(report.entries(found.findings))
    if found.choices:
        console.print(Text("\nSettings made before torch and MPI are loaded", style="bold"))
        show(report.settings(found.choices))
    console.print(Text("\n" + report.summary(found.findings), style=_STYLES[LEVELS[worst(found.findings)]]))
