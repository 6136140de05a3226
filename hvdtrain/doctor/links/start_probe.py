"""Measure links between hosts: with MPI, by a probe that mpirun starts on all of them, or with TCP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.hosts.survey import Hosts, NoAnswerError, Survey
from hvdtrain.doctor.links.measured import MOST_S, Direction, Links, budget_s, rounds
from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.launch.choose import AUTO, choose
from hvdtrain.launch.detect import detect_machine
from hvdtrain.launch.spec import Command, JobSpec, Mpi, join
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.variables import agent_environment
from hvdtrain.programs import run_program

EACH = 2
"""Ranks per host: two, so that links within a host are measured too."""
_START_S = 60.0
_END_S = 5.0
_TAIL = 6  # number of mpirun's last lines in an error message


def measure_links(
    hosts: Hosts, job: JobSpec, environment: Mapping[str, str], survey: Survey
) -> tuple[list[Finding], Links | None]:
    """Measure the links between the hosts that reach all others: with MPI if possible, else with TCP."""
    findings, names = list[Finding](), survey.reachable
    left_out = [host for host in survey.slots if host not in names]
    if left_out:
        found, why = f"not measured: {', '.join(left_out)}", "not all other hosts reach them"
        findings.append(Finding("probe", "warning", found, why, "fix the broken findings above, then run it again"))
    if not names or (len(names) == 1 and left_out):
        return findings, None
    if why := obstacle(survey, names):
        findings.append(Finding("probe", "ok", "measured with TCP", why))
    else:
        try:
            return findings, measure_by_mpi(job, environment, names, job.interface or common_interface(survey, names))
        except HvdtrainError as error:
            found = f"{error.what} {error.found or ''}".strip()
            why = "links are measured with TCP instead of MPI"
            findings.append(Finding("probe", "warning", found, why, error.next_step or ""))
    return findings, measure_by_tcp(hosts, names) if len(names) > 1 else None


def obstacle(survey: Survey, hosts: Sequence[str]) -> str:
    """Return why MPI cannot measure these hosts; "" if it can."""
    lacking = [host for host in hosts if not survey.facts[host].mpi4py]
    if lacking:
        return f"no mpi4py on {', '.join(lacking)}; install it with: pip install 'hvdtrain[bench]'"
    without = [host for host in hosts if not survey.facts[host].libmpi]
    return f"Horovod cannot load an MPI on {', '.join(without)}" if without else ""


def command(job: JobSpec, hosts: Sequence[str], interface: str, mpi: Mpi) -> Command:
    """Return the command that starts the probe on these hosts of a job.

    ``interface`` is that between the hosts, or their network; "" lets MPI choose. ``mpi`` is the MPI of Horovod.
    """
    slots = dict.fromkeys(hosts, EACH)
    probe = replace(job, ranks=EACH * len(hosts), nodes=len(hosts), hosts=slots, interface=interface, mpi=mpi)
    made = TARGETS[mpi.flavour].render(probe)
    assert isinstance(made, Command)
    return made


def common_interface(survey: Survey, hosts: Sequence[str]) -> str:
    """Return the interface between these hosts if it has the same name on all of them, else ""."""
    attempts = [survey.attempts.get(host, {}) for host in hosts]
    used = {attempt.interface for row in attempts for other, attempt in row.items() if other in hosts}
    return used.pop() if len(used) == 1 else ""


def measure_by_mpi(job: JobSpec, environment: Mapping[str, str], hosts: Sequence[str], interface: str) -> Links:
    """Run the probe `by_mpi` and return the links. Errors: LaunchError if mpirun failed, or there is none."""
    mpi = choose(AUTO, (), detect_machine(environment)).mpi
    if mpi is None:
        raise LaunchError("The mpirun of Horovod's MPI is missing.", next_step="hvdtrain doctor")
    made = command(job, hosts, interface, mpi)
    variables = {**agent_environment(environment), **made.variables}
    try:
        code, out, err = run_program(made.argv, MOST_S + _START_S, variables, end_s=_END_S)
    except OSError as error:
        raise LaunchError("mpirun did not end.", found=str(error), next_step=join(made.argv)) from None
    links = _parse_links(out)
    if links is None:
        output = [line.strip() for line in (out + err).splitlines() if line.strip(" -")]
        found = f"exit code {code}: {' '.join(output[-_TAIL:])}"
        raise LaunchError("mpirun did not measure these hosts.", found=found, next_step=join(made.argv))
    return links


def measure_by_tcp(hosts: Hosts, names: Sequence[str]) -> Links:
    """Measure all pairs of `names`, which reach each other. Pairs without a common host are measured in parallel."""
    each_s = budget_s(len(names))
    directions: list[Direction] = []

    def one(pair: tuple[str, str]) -> Direction | None:
        try:
            return Direction(*pair, *hosts.measure(*pair, each_s))
        except NoAnswerError:
            return None

    for pairs in rounds(len(names)):
        named = [(names[a], names[b]) for a, b in pairs]
        directions += [found for found in hosts.in_parallel(one, named) if found is not None]
    return Links(list(names), directions, "TCP, one stream")


def _parse_links(text: str) -> Links | None:
    """Find the JSON report of rank 0 in the output of mpirun."""
    for line in text.splitlines():
        try:
            return msgspec.convert(json.loads(line)["links"], Links)
        except (ValueError, KeyError, TypeError):
            continue
    return None
