"""``python -m hvdtrain.launch.srun_job [--interface IF] srun ...``: run srun with tasks that meet without MPI.

It serves the store for Horovod's Gloo on an address that the nodes of the allocation reach. The address contains a
random token; tasks get it only through srun's environment. Each task is a `slurm_task`.

It forwards SIGTERM, SIGINT and SIGUSR1 to the tasks by scancel, and only to them. On SIGTERM srun itself would send
SIGKILL to all tasks, which leaves no time to save. The first task publishes the number of the job step.
"""

from __future__ import annotations

import platform
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from hvdtrain.errors import USAGE, LaunchError
from hvdtrain.launch.hosts import node_names
from hvdtrain.launch.rendezvous import Rendezvous
from hvdtrain.launch.slurm_task import INTERFACE, LOG, ROUND, STEP, STORE, Batches
from hvdtrain.programs import run_program, wait_with_signals
from hvdtrain.runtime.environment import environ
from hvdtrain.runtime.interfaces import address_of, source_to

_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_LOOPBACK = "127.0.0.1"
_FORWARDED = {signal.SIGTERM: "TERM", signal.SIGHUP: "TERM", signal.SIGINT: "INT", signal.SIGUSR1: "USR1"}
_SCANCEL_S = 30


def scancel_id(environ: Mapping[str, str]) -> str:
    """Return scancel's id of this job alone. The plain id of a job of an array would mean the whole array.

    Errors: LaunchError if this process is not in an allocation.
    """
    job, array = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_JOB_ID", "")
    if not job:
        raise LaunchError(
            "this process is not in an allocation of Slurm",
            expected="SLURM_JOB_ID in the environment",
            next_step="start it by salloc or in a batch script; or submit a job: hvdtrain launch --to slurm",
        )
    return f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}" if array else job


def other_node(environ: Mapping[str, str], host: str) -> str:
    """Return a node of the allocation other than this host, "" where there is none. Pure."""
    here = {host, host.partition(".")[0], environ.get("SLURMD_NODENAME", host)}
    return next((name for name in node_names(environ.get("SLURM_JOB_NODELIST", "")) if name not in here), "")


def store_address(node: str, interface: str) -> str:
    """Return the address of this host that a node reaches. `node`: "" for a job on this host alone.

    Errors: LaunchError if there is none.
    """
    if interface or not node:
        found = address_of(interface) if interface else _LOOPBACK
        if not found:
            raise LaunchError(f"the interface {interface} has no IPv4 address here", next_step="see: ip -4 address")
        return found
    try:
        there = socket.getaddrinfo(node, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]
    except OSError as error:
        raise LaunchError(
            f"the address of node {node} is unknown on this host: {error}",
            next_step="give the network interface that leads to the nodes: --interface IF",
        ) from None
    found = source_to(str(there))
    if not found or found.startswith("127."):
        raise LaunchError(
            f"there is no route from this host to node {node}",
            found=f"its name resolves to {there}",
            next_step="give the network interface that leads to the nodes: --interface IF",
        )
    return found


def main(argv: Sequence[str]) -> int:
    """Run srun; return its exit code, 128 + number where a signal ended it, 2 where it cannot run here."""
    interface, srun = (argv[1], argv[2:]) if argv[:1] == ["--interface"] else ("", argv)
    now = environ()
    try:
        job = scancel_id(now)
        address = store_address(other_node(now, platform.node()), interface)
    except LaunchError as error:
        _say(f"error: {error}")
        return USAGE
    tasks = Tasks(job)

    def put(number: int, key: str, value: bytes) -> None:
        if key == STEP:
            tasks.set_step(value)
        elif key == LOG:
            _say(value.decode("ascii", "backslashreplace"))
        else:
            batches.put(key, value)

    rendezvous = Rendezvous(_say, address, put)
    batches = Batches(rendezvous.add)
    threading.Thread(target=batches.run, daemon=True).start()
    rendezvous.start()
    rendezvous.open(ROUND, {})
    given = {STORE: f"{rendezvous.address}/{ROUND}", _PORT: "0", **({INTERFACE: interface} if interface else {})}

    try:
        return _run(srun, {**now, **given}, tasks)
    finally:
        rendezvous.close()


class Tasks:
    """The tasks of this srun, for signals. `job`: scancel's id of it."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.step = ""  # its number, once the tasks have published it

    def set_step(self, step: bytes) -> None:
        """Set the number of the step, as text. Ignores anything else, as it becomes part of a command line."""
        if re.fullmatch(rb"[0-9]{1,9}", step):
            self.step = step.decode()

    def signal(self, name: str) -> None:
        """Send a signal, such as ``TERM``. An error is reported and ignored."""
        try:
            done = run_program(["scancel", f"--signal={name}", f"{self._job}.{self.step}"], _SCANCEL_S)
            found = done.err.strip() or (f"scancel ended with exit code {done.code}" if done.code else "")
        except OSError as error:
            found = str(error)
        if found:
            _say(f"SIG{name} did not reach the ranks: {found}")


def _run(srun: Sequence[str], environ: Mapping[str, str], tasks: Tasks) -> int:
    """Run srun and forward signals; return its exit code. Before there are ranks to save, a signal ends srun."""
    early: list[signal.Signals] = []
    process: subprocess.Popen[bytes] | None = None

    def heard(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(signal.Signals(number))
        elif tasks.step:
            tasks.signal(_FORWARDED[signal.Signals(number)])
        elif number != signal.SIGUSR1:
            process.terminate()

    for number in _FORWARDED:
        signal.signal(number, heard)
    try:
        process = subprocess.Popen(list(srun), env=dict(environ))
    except OSError as error:
        _say(f"error: {srun[0]} cannot be started: {error.strerror}")
        return 1
    for number in early:
        heard(number, None)
    return wait_with_signals(process)


def _say(text: str) -> None:
    sys.stderr.write(f"hvdtrain.launch.srun_job: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
