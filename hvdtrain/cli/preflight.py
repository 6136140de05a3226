"""``hvdtrain preflight``: the ranks of a job measure its hosts before training; rank 0 names bad ones."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.parser import Parser, above_0, end, local, positive
from hvdtrain.doctor.preflight import Deadline, Preflight, bad_hosts, fabric, host_checks, lines, unanswered
from hvdtrain.errors import BAD_HOSTS, ConfigError
from hvdtrain.files import read_text_or_empty, write_text
from hvdtrain.observe.output import make_output_unfailing
from hvdtrain.runtime.environment import TORCHRUN, RankInfo, by_gloo, change_variables

if TYPE_CHECKING:
    import torch

    from hvdtrain.comm.base import Comm

_DESCRIPTION = """\
Check the hosts of a job with its own ranks, in some 20 s: GPUs, free memory,
what NCCL uses between hosts, and the bandwidth of allreduces within each host,
between neighbouring hosts and over all ranks. Rank 0 prints a table."""
_EPILOG = """\
examples:
  hvdtrain launch -H a:4,b:4 -- preflight
  hvdtrain launch --to slurm --nodes 4 --gpus_per_node 8 -- preflight
  hvdtrain launch --to slurm --nodes 4 --gpus_per_node 8 --preflight -- [OPTIONS]

exit code: 0 if no host is bad; 3 if some are, or do not answer; 124 if the
ranks did not finish in time for an unknown reason; 1 on another error
"""
_HUNG = 124
"""As of timeout(1)."""


def parser() -> Parser:
    """Declare the options."""
    made = Parser(prog="hvdtrain preflight", description=_DESCRIPTION, epilog=_EPILOG)
    add, seconds = made.add_argument, partial(above_0, most=1e6)
    add("--seconds", type=seconds, default=20.0, metavar="S", help="time for measuring (default: 20)")
    late = "end after S seconds, and name the hosts that did not answer (default: 120)"
    add("--timeout", type=seconds, default=120.0, metavar="S", help=late)
    least = "a host is bad below F times the median bandwidth (default: 0.5)"
    add("--least", type=above_0, default=0.5, metavar="F", help=least)
    gpus = "GPUs that each host must have (default: those of hvdtrain launch --gpus_per_node)"
    add("--gpus", type=positive, default=0, metavar="N", help=gpus)
    add("--write", type=local, metavar="FILE", help="write the names of the bad hosts, one per line")
    add("--json", action="store_true", help="print JSON")
    return made


def main(argv: list[str]) -> int:
    """Measure, print on rank 0, and return the exit code: that of rank 0 counts, other ranks return 0."""
    make_output_unfailing()
    options = parser().parse_args(argv)
    info: RankInfo | None = None
    with tempfile.TemporaryDirectory(prefix="hvdtrain-preflight-") as folder:
        log = Path(folder, "nccl.log")
        try:
            # Horovod makes process sets later, and NCCL logs its connections.
            nccl = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(log)}
            change_variables({"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **nccl})
            from hvdtrain.runtime.tuning import prepare

            info, _ = prepare()
            found = _examine(options, info, log)
        except (Exception, KeyboardInterrupt) as error:
            return end(error, info)
    return BAD_HOSTS if found.bad and info.rank == 0 else 0


def _examine(options: argparse.Namespace, info: RankInfo, log: Path) -> Preflight:
    """Measure and report. Collective: yes."""
    from hvdtrain.comm.objects import allgather_json, on_rank_0
    from hvdtrain.comm.rounds import STARTED, start_rounds

    if info.rank == 0:
        _write(options.write, ())  # an error after the measurement would be too late
    hosts: list[str] = []
    deadline = Deadline(options.timeout, info.rank, partial(_give_up, options, info, hosts, log))
    rounds = start_rounds(info, horovod=True)
    comm = rounds.enter(STARTED)
    facts = allgather_json(comm, _rank_facts(info), name="preflight/facts")
    hosts += [fact["host"] for fact in facts]
    found = _measure(comm, options, info, facts, log, deadline)
    deadline.close()

    def show() -> None:
        print(json.dumps(asdict(found)) if options.json else "\n".join(lines(found)), flush=True)
        _write(options.write, found.bad)

    on_rank_0(comm, show, name="preflight/shown")
    if info.rank or not found.bad:
        rounds.report_leaving("finished")
    return found


def _rank_facts(info: RankInfo) -> dict[str, Any]:
    """Return what this rank sees of its host."""
    import psutil
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = [torch.cuda.get_device_properties(index) for index in range(count)]
    names = [info.variables.get(name, "") for name in ("SLURMD_NODENAME", "HOROVOD_HOSTNAME")]
    return {
        "host": next(filter(None, names), socket.gethostname()),  # as the scheduler or the launcher names it
        "gpus": {str(gpu.uuid): gpu.name for gpu in seen},
        "free_bytes": psutil.virtual_memory().available,
    }


def _measure(
    comm: Comm, options: argparse.Namespace, info: RankInfo, facts: list[dict[str, Any]], log: Path, deadline: Deadline
) -> Preflight:
    """Measure, and judge the hosts. Collective: yes."""
    from hvdtrain.comm.link_probe import HostSpeeds, measure_hosts
    from hvdtrain.comm.objects import allgather_json
    from hvdtrain.comm.torch_store import store_over
    from hvdtrain.training.start.device import pick_device

    if comm.size > 1:
        deadline.connect(store_over(comm), comm.size, comm.in_flight)
    speeds, notes, by = HostSpeeds({}, {}, None), [], "nothing"
    hosts = host_checks(facts, speeds)
    enough = all(host.gpus >= host.ranks for host in hosts)
    if enough or not any(host.gpus for host in hosts):
        device = pick_device("cuda" if enough else "cpu", comm.local_rank, comm.local_size, comm)
        speeds = measure_hosts(comm, device, [str(fact["host"]) for fact in facts], options.seconds, options.least)
        later = allgather_json(comm, _later_facts(comm, device, log), name="preflight/later")
        hosts = host_checks([fact | more for fact, more in zip(facts, later, strict=True)], speeds)
        library = "Gloo" if info.launcher == TORCHRUN or by_gloo(info.variables) else "MPI"
        tensors = "GPUs: Horovod has no NCCL" if device.type == "cuda" else "CPUs"
        by = "NCCL" if any(host.fabric for host in hosts) else f"{library}, of tensors on {tensors}"
    else:
        notes.append("not measured: some hosts have fewer GPUs than ranks")
    if 0 < len(speeds.between) < 3:
        notes.append("two hosts share one link: if it is slow, this does not tell which of them is")
    return Preflight(hosts, bad_hosts(hosts, options.gpus, options.least), by, speeds.everyone, tuple(notes))


def _later_facts(comm: Comm, device: torch.device, log: Path) -> dict[str, Any]:
    """Return what this rank knows after the measurement. Collective: yes."""
    import torch

    from hvdtrain.observe.monitor import gpu_identity, gpu_remarks

    comm.allreduce(torch.zeros(1), name="preflight/together").wait()
    clock_s = time.time()
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    gpu = gpu_identity(device)
    return {
        "clock_s": clock_s,
        "fabric": fabric(read_text_or_empty(log).splitlines(), cards),
        "remarks": gpu_remarks(gpu) if gpu is not None else [],
        "gpu_free_bytes": torch.cuda.mem_get_info(device)[0] if gpu is not None else None,
    }


def _write(path: Path | None, hosts: Iterable[str]) -> None:
    """Write the names of hosts to a new or a regular file. Errors: ConfigError."""
    if path is None:
        return
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"--write {path} is no regular file", next_step="name another file")
    try:
        write_text(path, "".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise ConfigError(f"--write {path}: {error.strerror}", next_step="name another file") from error


def _give_up(
    options: argparse.Namespace,
    info: RankInfo,
    hosts: Sequence[str],
    log: Path,
    alive: Mapping[int, bool] | None,
    running: Mapping[int, Sequence[str]],
) -> None:
    """End this process at the deadline; on rank 0, name the hosts that did not answer, and what each rank waits for."""
    missing = unanswered(alive, hosts) if alive is not None else []
    if info.rank == 0:
        if missing:
            text = f"did not answer within {options.timeout:g} s: {', '.join(missing)}"
        elif alive is not None:
            text = f"the ranks did not finish within {options.timeout:g} s, and none is behind the others"
        else:
            text = f"the ranks were not connected within {options.timeout:g} s"
        waits = [f"rank {rank} waits for {', '.join(names) or 'no other rank'}" for rank, names in running.items()]
        sys.stderr.write("".join(f"hvdtrain preflight: {line}\n" for line in [text, *waits]))
        sys.stderr.flush()
        with suppress(ConfigError):
            _write(options.write, missing)
    shutil.rmtree(log.parent, ignore_errors=True)
    os._exit(BAD_HOSTS if missing else _HUNG)
