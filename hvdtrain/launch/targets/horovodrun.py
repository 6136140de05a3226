"""Horovod's own launcher: over MPI where it can drive that, else over Gloo; elastic only over Gloo."""

from __future__ import annotations

import shlex

from hvdtrain.errors import LaunchError
from hvdtrain.launch.detect import Machine
from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets.base import Pick, Target
from hvdtrain.launch.targets.openmpi import variables


def render(spec: JobSpec) -> Command:
    """Return the start by horovodrun.

    It passes on all variables except those that it refuses. For an Open MPI from a wheel it needs the prefix.

    Errors:
        LaunchError: an elastic job on this host alone, which it refuses.
    """
    if spec.elastic is not None and spec.discover is None and spec.nodes < 2:
        raise LaunchError(
            "horovodrun runs elastic jobs only on two or more hosts",
            expected="--discover SCRIPT, or -H with two hosts",
            found="this host alone",
            next_step="use --to hvdtrain, which runs them on one host too",
        )
    over_mpi = spec.mpi is not None and spec.elastic is None
    words = ["horovodrun", "-np", str(spec.ranks)]
    words += [] if over_mpi else ["--gloo"]
    if spec.elastic is not None:
        least, most = spec.elastic
        words += ["--min-np", str(least), "--max-np", str(most)]
    if spec.discover is not None:
        words += ["--host-discovery-script", spec.discover]
    else:
        words += ["-H", spec.host_list or f"localhost:{spec.ranks}"]
    words += ["--network-interface", spec.interface] if spec.interface else []
    words += ["--ssh-port", str(spec.ssh_port)] if spec.ssh_port else []
    if over_mpi and spec.remote and spec.mpi is not None and spec.mpi.prefix:
        words += [f"--mpi-args=--prefix {shlex.quote(spec.mpi.prefix)}"]  # a shell reads it
    return Command((*words, *spec.program), variables(spec) if over_mpi else {})


def choose(machine: Machine, in_image: bool) -> Pick:
    """Pick an Open MPI 4, the only MPI that horovodrun supports."""
    mpi = machine.own_mpi
    if mpi is None or (mpi.flavour, mpi.major) != ("openmpi", 4):
        return None, "; over Gloo, as horovodrun supports only Open MPI 4"
    return mpi, ""


_TAKES = frozenset({"hosts", "interface", "ssh_port", "elastic", "discover"})
TARGET = Target("horovodrun", render, takes=_TAKES, choose=choose, shows_variables=True)
