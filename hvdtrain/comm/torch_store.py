"""Where the ranks of a job meet to form torch's process groups: a TCPStore, under any launcher.

torch's Gloo and our store listen on one address: the loopback interface if all ranks are on one host, else the
interface towards the other hosts. The variable GLOO_SOCKET_IFNAME, if it is set, decides for Gloo. torchrun opens its
own store, on all interfaces.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.errors import LaunchError, UnreachableError
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.runtime.interfaces import bind_torch, source_to

FOREVER = timedelta(days=30)  # limit of one wait for other ranks. The watchdog ends a run without progress sooner.

_LOOPBACK = "127.0.0.1"
_LEAVE_OUT = "leave out init_process_group: hvdtrain calls it"
_QUEUE = 1024  # connections that may wait to be accepted; the system may allow fewer


def store_of_torchrun(info: RankInfo) -> dist.Store:
    """Connect to the store that torchrun's variables describe. Collective: yes.

    Errors: LaunchError if a variable is missing or wrong; UnreachableError if nothing answers there.
    """
    variables = info.variables
    address, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise LaunchError(
            "torchrun started this process, but MASTER_ADDR or MASTER_PORT is invalid",
            expected="the address and the port of its store",
            found=f"MASTER_ADDR={address!r}, MASTER_PORT={port!r}",
            next_step="start all ranks by torchrun, and do not change its variables",
        )
    bind_torch(_LOOPBACK if info.one_host else _resolve(address))
    serves = info.rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _connect(address, int(port), info.size, serves=serves)
    return dist.PrefixStore(f"hvdtrain/{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def store_over(comm: Comm) -> dist.Store:
    """Open a store on rank 0 and connect all ranks to it. Collective: yes.

    Errors: UnreachableError, on every rank if rank 0 has no address that the others reach.
    """
    hosts = allgather_json(comm, socket.gethostname(), name="torch/hosts")
    opened: list[dist.Store] = []

    def serve() -> list[str | int]:
        address = _LOOPBACK if comm.local_size == comm.size else _address_for(hosts)
        listening = socket.socket(socket.AF_INET)
        listening.bind((address, 0))
        listening.listen(_QUEUE)
        port = int(listening.getsockname()[1])
        opened.append(_connect(address, port, comm.size, serves=True, descriptor=listening.detach()))
        return [address, port]

    address, port = on_rank_0(comm, serve, name="torch/store")
    bind_torch(str(address))
    return opened[0] if opened else _connect(str(address), int(port), comm.size, serves=False)


def join_default_group(store: dist.Store | None, rank: int, size: int) -> None:
    """Join torch's default group of all ranks; do nothing if the program has done so. Collective: yes.

    Errors: LaunchError if the program's group has other ranks, or no Gloo for CPU tensors.
    """
    if not dist.is_initialized():
        # The backend decides by device: `parallel.device cpu` may be chosen where GPUs are.
        nccl = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=FOREVER)
    if (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise LaunchError(
            "the program's torch.distributed group has other ranks than this job",
            expected=f"rank {rank} of {size}",
            found=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            next_step=_LEAVE_OUT,
        )
    if "cpu:gloo" not in (backend := dist.get_backend_config()):
        raise LaunchError(
            "the program's torch.distributed group cannot send CPU tensors",
            expected="cpu:gloo,cuda:nccl",
            found=backend,
            next_step=_LEAVE_OUT,
        )


def _connect(address: str, port: int, size: int, *, serves: bool, descriptor: int | None = None) -> dist.Store:
    try:
        return dist.TCPStore(address, port, size, serves, FOREVER, wait_for_workers=False, master_listen_fd=descriptor)
    except (RuntimeError, OSError) as error:
        raise UnreachableError(
            f"this rank cannot reach the store at {address}:{port}, where ranks meet for torch.distributed",
            found=str(error).partition("\n")[0],
            next_step="open connections between the hosts, or choose an interface: export GLOO_SOCKET_IFNAME=NAME",
        ) from None


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError:
        return ""


def _address_for(hosts: list[str]) -> str:
    """Return this host's address for packets to the others."""
    others = [host for host in dict.fromkeys(hosts) if host != hosts[0]]
    found = next((source for host in others if (source := source_to(_resolve(host)))), "")
    if found and not found.startswith("127."):
        return found
    raise UnreachableError(
        "rank 0 finds no address that the other hosts reach, which torch.distributed needs",
        expected=f"a name with an address for each host: {', '.join(others)}",
        found=found or "no route to any of them",
        next_step="add the hosts' names and addresses to DNS or /etc/hosts",
    )
