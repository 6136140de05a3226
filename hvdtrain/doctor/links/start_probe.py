"""Starting the probe of links by MPI, on all hosts, from one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from hvdtrain.doctor.hosts.survey import Ask, Survey
from hvdtrain.doctor.links.link_pairs import MOST_S
from hvdtrain.doctor.links.measured import Links
from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import AUTO, choose
from hvdtrain.launch.detect import detect_machine
from hvdtrain.launch.spec import Command, JobSpec, Mpi, join
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.worker_plan import agent_environment, handed_on
from hvdtrain.programs import run_program

PROBE = ("doctor", "--probe", "--json")
"""What each rank runs."""
EACH = 2
"""Ranks of a host, so that what is inside it is measured too."""
_START_S = 60.0
_END_S = 5.0
_TAIL = 6
"""Lines of what mpirun said."""


def cannot(survey: Survey, hosts: Sequence[str]) -> str:
    """Why MPI cannot measure between these hosts; "" where it can."""
    lacking = [host for host in hosts if not survey.says[host].mpi4py]
    if lacking:
        return f"no mpi4py on {', '.join(lacking)}: pip install 'hvdtrain[bench]' measures what training gets"
    without = [host for host in hosts if not survey.says[host].libmpi]
    return f"Horovod has no MPI that loads on {', '.join(without)}" if without else ""


def command(ask: Ask, hosts: Sequence[str], interface: str, mpi: Mpi) -> Command:
    """What starts it.

    Args:
        ask: how hosts are reached.
        hosts: two ranks on each.
        interface: of the network between them, or the network itself; "" leaves it to MPI.
        mpi: that Horovod speaks.
    """
    names = ("PATH", "LD_LIBRARY_PATH", *handed_on(ask.environment))
    spec = JobSpec(
        arguments=PROBE,
        ranks=EACH * len(hosts),
        nodes=len(hosts),
        hosts=dict.fromkeys(hosts, EACH),
        python=ask.python,
        folder=ask.folder,
        pass_on=tuple(name for name in names if name in ask.environment),
        interface=interface,
        ssh_port=ask.ssh_port,
        ssh_options=ask.ssh_options,
        mpi=mpi,
        is_root=os.geteuid() == 0,
    )
    made = TARGETS[mpi.flavour].render(spec)
    assert isinstance(made, Command)
    return made


def network(survey: Survey, hosts: Sequence[str]) -> str:
    """The interface between these hosts where all call it the same; "" else, or where there is one host."""
    used = {tried.interface for host in hosts for other, tried in survey.tried.get(host, {}).items() if other in hosts}
    return used.pop() if len(used) == 1 else ""


def measure(ask: Ask, hosts: Sequence[str], interface: str) -> Links:
    """Start it and wait.

    Errors:
        LaunchError: there is nothing to start it with, or it failed.
    """
    mpi = choose(AUTO, (), detect_machine(ask.environment)).mpi
    if mpi is None:
        raise LaunchError("There is no mpirun of the MPI that Horovod speaks.", next_step="hvdtrain doctor")
    made = command(ask, hosts, interface, mpi)
    environment = {**agent_environment(ask.environment), **made.variables}
    try:
        code, out, err = run_program(made.argv, MOST_S + _START_S, environment, end_s=_END_S)
    except OSError as error:
        raise LaunchError("mpirun did not come to an end.", found=str(error), next_step=join(made.argv)) from None
    links = _links(out)
    if links is None:
        said = [line.strip() for line in (out + err).splitlines() if line.strip(" -")]
        found = f"exit code {code}: {' '.join(said[-_TAIL:])}"
        raise LaunchError("mpirun did not measure these hosts.", found=found, next_step=join(made.argv))
    return links


def _links(text: str) -> Links | None:
    """What rank 0 said, among what else mpirun shows."""
    for line in text.splitlines():
        try:
            said: Mapping[str, object] = json.loads(line)
            return Links.of_data(said["links"])  # type: ignore[arg-type]
        except (ValueError, KeyError, TypeError):
            continue
    return None
