"""Ask ranks to save and end, and wait until they have. Pods of a Kubernetes job run it before they end (`preStop`).

    python -m hvdtrain.launch.drain PID             the ranks among the descendants of a process
    python -m hvdtrain.launch.drain --hosts FILE    the ranks below process 1 of each host of a host file, by ssh

A worker's sshd would end at once on SIGTERM, and the ranks with it. mpirun of Open MPI 4 passes SIGTERM on too late:
after ``odls_base_sigkill_timeout`` seconds. Kubernetes ends the wait when ``terminationGracePeriodSeconds`` is over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from hvdtrain.runtime.channel import VARIABLE

_OF_RANKS = ("OMPI_COMM_WORLD_RANK", VARIABLE)
"""Variables of ranks, one for each launcher of an MPIJob: Open MPI, and our own driver."""

_CONNECT_S = 10


def find_ranks(root: psutil.Process) -> list[psutil.Process]:
    """Return the ranks among the descendants of a process, without the processes that ranks started."""
    found: dict[int, tuple[psutil.Process, int]] = {}
    for process in root.children(recursive=True):
        with suppress(psutil.Error):  # it has ended, or is of another user
            if any(name in process.environ() for name in _OF_RANKS):
                found[process.pid] = process, process.ppid()
    return [process for process, parent in found.values() if parent not in found]


def drain(pid: int) -> None:
    """Send SIGTERM to the ranks below a process, and wait until all have ended."""
    ranks = find_ranks(psutil.Process(pid))
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGTERM)
    psutil.wait_procs(ranks)


def drain_hosts(file: Path) -> None:
    """Drain all hosts of a host file at once. A host that cannot be reached is skipped: it is probably ending, too."""
    names = [line.split()[0] for line in file.read_text().splitlines() if line.strip()]
    there = (sys.executable, "-m", "hvdtrain.launch.drain", "1")
    ssh = ("ssh", "-o", f"ConnectTimeout={_CONNECT_S}")
    for started in [subprocess.Popen((*ssh, name, *there), stdin=subprocess.DEVNULL) for name in names]:
        started.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--hosts":
        drain_hosts(Path(sys.argv[2]))
    else:
        drain(int(sys.argv[1]))
