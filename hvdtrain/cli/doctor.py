"""``hvdtrain doctor``: what is installed, whether it fits together, and the settings chosen, each with its reason."""

from __future__ import annotations

import argparse
import io
import json
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.cli import doctor_hosts
from hvdtrain.cli.parser import Parser
from hvdtrain.doctor import report
from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts import gather
from hvdtrain.doctor.finding import LEVELS, Finding, worst
from hvdtrain.doctor.nccl_log import NcclLog, read_nccl_log
from hvdtrain.errors import ConfigError, HvdtrainError, LaunchError
from hvdtrain.regular import open_regular
from hvdtrain.runtime.environment import RankInfo, environ
from hvdtrain.runtime.tuning import Choice, prepare

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red", "set": "green", "left": ""}


def parser() -> Parser:
    """Declare the options."""
    made = Parser(
        prog="hvdtrain doctor",
        description="Look at this machine and installation: versions, what Horovod is built with, MPI, the launcher, "
        "GPUs, network, limits, the run folder, the settings chosen; name what does not fit, with its cure. Under a "
        "launcher rank 0 speaks for all. Exit status: 0 all is well, 1 warnings, 2 something is broken.",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument(
        "--run_dir", metavar="DIR", type=Path, default=Path("runs"), help="the folder that runs are written to; runs"
    )
    made.add_argument(
        "--nccl_log", metavar="FILE", type=Path, help="read also what NCCL wrote there under NCCL_DEBUG=INFO"
    )
    doctor_hosts.add_options(made)
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand; gives the exit status: 0 all is well, 1 warnings, 2 something is broken."""
    options = parser().parse_args(argv)
    try:
        doctor_hosts.check_options(options)
        if options.hosts:
            return doctor_hosts.show(doctor_hosts.look(options), as_json=options.json)
        log = _read(options.nccl_log) if options.nccl_log else None
        info, choices, refusal = _prepared(options)
        if options.probe:
            found = doctor_hosts.probe(options, info)
            return doctor_hosts.show(found, as_json=options.json) if info.rank == 0 else 0
    except HvdtrainError as error:
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("hvdtrain: interrupted\n")
        return 128 + signal.SIGINT
    if info.rank != 0:
        return 0
    findings = examine(gather(info, choices, environ(), options.run_dir, log, refusal))
    if options.json:
        print(json.dumps(report.as_json(info, findings, choices)))
    elif sys.stdout.isatty():
        _print_table(findings, choices)
    else:
        print("\n".join(report.lines(findings, choices)))
    return worst(findings)


def _prepared(options: argparse.Namespace) -> tuple[RankInfo, Sequence[Choice], LaunchError | None]:
    """Which rank this is, the settings, and why the launcher's variables make no sense where they do not.

    Errors:
        LaunchError: they do not, and ranks are needed.
    """
    try:
        return *prepare(), None
    except LaunchError as error:
        if options.probe:
            raise
        return RankInfo(host=platform.node()), (), error


def _read(path: Path) -> NcclLog:
    try:
        with io.TextIOWrapper(open_regular(path), errors="replace") as file:
            return read_nccl_log(file, str(path))
    except OSError as error:
        raise ConfigError(
            f"--nccl_log {path} cannot be read.",
            expected="a file with what a job wrote under NCCL_DEBUG=INFO",
            found=error.strerror,
        ) from error


def _print_table(findings: Sequence[Finding], choices: Sequence[Choice]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def show(entries: Sequence[report.Entry]) -> None:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for entry in entries:
            name = [Text(entry.name)] if entry.name else []
            text = Text("\n".join([entry.text, *entry.remarks]))
            table.add_row(Text(entry.mark, style=_STYLES[entry.mark]), *name, text)
        console.print(table)

    show(list(report.entries(findings)))
    if choices:
        console.print(Text("\nSettings, in place before torch and MPI are loaded", style="bold"))
        show(list(report.settings(choices)))
    console.print(Text("\n" + report.summary(findings), style=_STYLES[LEVELS[worst(findings)]]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
