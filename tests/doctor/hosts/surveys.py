from __future__ import annotations

from dataclasses import replace

from hvdtrain.doctor.facts.machine import Interface, Limits
from hvdtrain.doctor.hosts.host_probe import Attempt, HostReport
from hvdtrain.doctor.hosts.survey import Survey
from hvdtrain.runtime.host import HostFacts

A = HostReport(
    name="node-a",
    address="10.0.0.1",
    hvdtrain="1.0",
    python="3.11.7",
    torch="2.13.0",
    horovod="0.28.1+torch2.13.0",
    horovod_wrong="",
    libmpi="Open MPI v4.1.8",
    mpirun="mpirun (Open MPI) 4.1.8",
    kernel="Linux 6.1",
    machine="x86_64",
    gpus=(),
    driver="",
    host=HostFacts(cores=8),
    limits=Limits(files=1 << 20),
    folder=True,
    interfaces=(Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1500),),
)
ETH0_OF_B = Interface("eth0", "10.0.0.2", "10.0.0.0/24", 1500)
B = replace(A, name="node-b", address="10.0.0.2", interfaces=(ETH0_OF_B,))
WELL = Survey(
    slots={"a": 2, "b": 2},
    folder="/work",
    writer="a",
    facts={"a": A, "b": B},
    addresses={"a": "10.0.0.1", "b": "10.0.0.2"},
    attempts={"a": {"b": Attempt("", "eth0", 1500)}, "b": {"a": Attempt("", "eth0", 1500)}},
    sees_file={"a": True, "b": True},
)


def other(**changes: object) -> Survey:
    """The same, b being another."""
    return replace(WELL, facts={"a": A, "b": replace(B, **changes)})  # type: ignore[arg-type]


def tried(fault: str) -> Survey:
    """The same, but for the way from a to b."""
    return replace(WELL, attempts={**WELL.attempts, "a": {"b": Attempt(fault, "eth0", 1500)}})
