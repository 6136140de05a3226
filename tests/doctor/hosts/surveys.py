"""What two hosts have said, all of it well."""

from __future__ import annotations

from dataclasses import replace

from hvdtrain.doctor.hosts.clock_offset import Offset
from hvdtrain.doctor.hosts.host_facts import HostSays
from hvdtrain.doctor.hosts.network import Interface
from hvdtrain.doctor.hosts.peers import Tried
from hvdtrain.doctor.hosts.survey import Survey

A = HostSays(
    name="node-a",
    address="10.0.0.1",
    hvdtrain="1.0",
    python="3.11.7",
    torch="2.13.0",
    horovod="0.28.1+torch2.13.0",
    horovod_wrong="",
    mpi4py="4.1",
    libmpi="Open MPI v4.1.8",
    libmpi_path="/v/lib/libmpi.so.40",
    mpirun="mpirun (Open MPI) 4.1.8",
    kernel="Linux 6.1",
    machine="x86_64",
    cores=8,
    gpus=(),
    driver="",
    fabric=False,
    open_files=1 << 20,
    locked_bytes=-1,
    folder=True,
    interfaces=(Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1500, 10000),),
)
B = replace(
    A,
    name="node-b",
    address="10.0.0.2",
    interfaces=(Interface("eth0", "10.0.0.2", "10.0.0.0/24", 1500, 10000),),
)
WELL = Survey(
    slots={"a": 2, "b": 2},
    folder="/work",
    writer="a",
    says={"a": A, "b": B},
    addresses={"a": "10.0.0.1", "b": "10.0.0.2"},
    offsets={"a": Offset(0.0, 1e-4), "b": Offset(1e-5, 2e-4)},
    tried={"a": {"b": Tried("", "eth0", 1500)}, "b": {"a": Tried("", "eth0", 1500)}},
    sees={"a": True, "b": True},
)


def other(**changes: object) -> Survey:
    """The same, b being another."""
    return replace(WELL, says={"a": A, "b": replace(B, **changes)})  # type: ignore[arg-type]


def tried(fault: str) -> Survey:
    """The same, but for the way from a to b."""
    return replace(WELL, tried={**WELL.tried, "a": {"b": Tried(fault, "eth0", 1500)}})
