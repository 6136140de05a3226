"""Refuse jobs that cannot start as requested, with the reason. Pure."""

from __future__ import annotations

from collections.abc import Collection

from hvdtrain.errors import LaunchError
from hvdtrain.launch.choose import OWN, OWN_OPTIONS
from hvdtrain.launch.spec import JobSpec
from hvdtrain.launch.targets import TARGETS
from hvdtrain.launch.targets.base import BY_MPI

COMMON = frozenset({"np", "to", "dry_run"})
"""Options that every target takes."""

OWN_TAKES = OWN_OPTIONS | BY_MPI
_ELASTIC = "the loss of a rank ends an MPI job; elastic jobs use Gloo"


def refuse_options(to: str, given: Collection[str]) -> None:
    """Refuse options that a target does not use, instead of ignoring them.

    Errors:
        LaunchError: such an option.
    """
    takes = COMMON | (OWN_TAKES if to == OWN else TARGETS[to].takes)
    wrong = next((option for option in given if option not in takes), None)
    if wrong is None:
        return
    able = [OWN] if wrong in OWN_TAKES else []
    able += [target.name for target in TARGETS.values() if wrong in target.takes]
    option = flag(wrong)
    what = f"--to {to} does not support {option}."
    if wrong in ("elastic", "discover") and to != OWN and TARGETS[to].mpi:
        what = f"--to {to} cannot be elastic: {_ELASTIC}."
    raise LaunchError(what, next_step=f"omit {option}, or use " + ", ".join(f"--to {name}" for name in able))


def refuse_shape(spec: JobSpec, to: str) -> None:
    """Refuse numbers of ranks, hosts and GPUs that do not fit together.

    Errors:
        LaunchError: they do not.
    """
    slots = sum(spec.hosts.values())
    if spec.hosts and spec.discover is None and slots < spec.ranks:
        named = ",".join(f"{host}:{count}" for host, count in spec.hosts.items())
        raise LaunchError(
            "-np is larger than the number of slots of -H",
            expected=f"-np {slots} at most, or more slots",
            found=f"-np {spec.ranks} and -H {named}",
        )
    if to in TARGETS and TARGETS[to].even:
        _refuse_uneven(spec, to)
    if to in TARGETS and "array" in TARGETS[to].takes:
        _refuse_in_queue(spec)
    if spec.gpus_per_node and spec.gpus_per_node % spec.ranks_per_node:
        raise LaunchError(
            "the ranks do not match the GPUs: each rank uses one GPU",
            expected=f"ranks per host: {_divisors(spec.gpus_per_node)}",
            found=f"{spec.ranks_per_node} rank(s) per host, --gpus-per-node {spec.gpus_per_node}",
            next_step=f"-np {spec.nodes * spec.gpus_per_node}, or other --nodes",
        )
    if spec.elastic is not None:
        least, most = spec.elastic
        if not 1 <= least <= spec.ranks <= most:
            raise LaunchError(
                "--elastic is not MIN:MAX with MIN <= -np <= MAX",
                expected=f"1 <= MIN <= -np ({spec.ranks}) <= MAX",
                found=f"{least}:{most}",
            )


def _refuse_uneven(spec: JobSpec, to: str) -> None:
    if len(set(spec.hosts.values())) > 1:
        raise LaunchError(
            f"--to {to} needs the same number of ranks on each host",
            expected="-H with equal numbers of slots; only the numbers are used",
            found=",".join(f"{host}:{count}" for host, count in spec.hosts.items()),
        )
    if spec.ranks % spec.nodes:
        raise LaunchError(
            "the ranks cannot be divided evenly among the hosts",
            expected=f"a multiple of {spec.nodes}",
            found=f"-np {spec.ranks} on {spec.nodes} hosts",
            next_step=f"-np {spec.nodes * spec.ranks_per_node}, or other --nodes",
        )


def _refuse_in_queue(spec: JobSpec) -> None:
    batch = spec.batch
    if batch.time_s is not None and batch.notice_s >= batch.time_s:
        raise LaunchError(
            "--notice is not shorter than the job's time",
            expected=f"--notice below --time ({batch.time_s}s)",
            found=f"--notice {batch.notice_s}s",
        )
    if batch.array and not any("{array}" in word for word in spec.arguments):
        raise LaunchError(
            "all jobs of the array would be the same run",
            expected="{array} in an argument, which becomes the index",
            next_step="... -- --seed {array} --run_dir runs/{array}",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)


def flag(option: str) -> str:
    """Return an option as it is typed."""
    return {"hosts": "-H", "np": "-np"}.get(option, f"--{option.replace('_', '-')}")
