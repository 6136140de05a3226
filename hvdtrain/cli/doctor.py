"""``hvdtrain doctor``: check the installation, this machine and other hosts; show the settings that are chosen."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from hvdtrain.cli.launch_options import add_ssh
from hvdtrain.cli.parser import Parser, local
from hvdtrain.doctor.checks import examine
from hvdtrain.doctor.facts import gather
from hvdtrain.doctor.hosts.checks import examine as examine_hosts
from hvdtrain.doctor.hosts.survey import Hosts
from hvdtrain.doctor.report import Report, worst
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.launch.hosts import parse_hosts
from hvdtrain.launch.spec import JobSpec
from hvdtrain.runtime.environment import RankInfo, environ
from hvdtrain.runtime.tuning import prepare


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
    several = made.add_argument_group("several hosts").add_argument
    several("--hosts", metavar="a,b", help="check and compare these hosts over ssh")
    add_ssh(several)
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
    else:
        print("\n".join(found.lines()))
    return worst(found.findings)


def _examine(options: argparse.Namespace) -> Report | None:
    """Return the report; None on ranks other than 0."""
    if options.hosts:
        return _check_hosts(options)
    refusal: LaunchError | None = None
    try:
        info, choices = prepare()
    except LaunchError as error:  # the launcher's variables are inconsistent
        info, choices, refusal = RankInfo(host=platform.node()), [], error
    if info.rank != 0:
        return None
    return Report(examine(gather(info, environ(), options.run_dir, refusal)), info, choices)


def _check_hosts(options: argparse.Namespace) -> Report:
    """Check all hosts of ``--hosts``. Errors: HvdtrainError: --hosts is invalid."""
    hosts = parse_hosts(options.hosts)
    job = JobSpec(
        arguments=(),
        ranks=sum(hosts.values()),
        hosts=hosts,
        host=platform.node(),
        python=sys.executable,
        folder=str(Path.cwd()),
        ssh_port=options.ssh_port,
        ssh_options=tuple(options.ssh_option),
    )
    with Hosts(job, environ()) as probes:
        return Report(examine_hosts(probes.survey()))
