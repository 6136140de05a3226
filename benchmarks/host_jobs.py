"""Jobs of `jobs.py` with one rank on each of two hosts: ours and Horovod's by mpirun, torch's by its own variables."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
from common import HERE
from jobs import BY_TORCH, Job, Setting, ours, peer, torchrun

from tests.support.two_hosts import LINK, TwoHosts

MARK = "BENCHMARK_JOB"
"""The variable by which the processes of a job are known, wherever they run."""
PORTS = itertools.count(29500)
"""Where the rank 0 of a group listens."""


class HostsJob(Job):
    """The two processes of one contender; its `kind` is ours, `jobs.BY_TORCH` or one of `peer_loops.PEERS`."""

    def __init__(self, name: str, kind: str, setting: Setting, folder: Path, hosts: TwoHosts) -> None:
        self.name = name
        self.folder = folder
        self._hosts = hosts
        self._journal = folder / "journal.jsonl"
        self._output = (folder / "output.txt").open("w+")
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._variables = {MARK: f"{os.getpid()}/{name}", "PYTHONPATH": path, **setting.variables}
        is_ours = kind in ("ours", BY_TORCH)
        rank = ours(setting, folder) if is_ours else peer(kind, setting, self._journal)
        if kind == "ours" or kind.startswith("stock_horovod"):
            self._processes = [self._start(0, hosts.mpirun_command(rank, environment=self._variables))]
        else:
            self._processes = self._group(rank, torchrun(0, 1) if kind == BY_TORCH else {})

    def bytes_a_step(self, steps: int) -> float:
        """Bytes that left one host for each step, by the counters of the interfaces, over a run of so many steps."""
        counted: dict[int, int] = {}

        def reached(seen: list[dict[str, float]]) -> bool:
            # when a step's line is there its exchange is over, and that of the next begins in the next backward pass
            if len(seen) not in counted:
                counted[len(seen)] = sum(host.sent_bytes() for host in (self._hosts.a, self._hosts.b))
            return len(seen) > min(counted) + steps

        self.until(reached, every_s=0.02)
        first, *_, last = sorted(counted)[1:]  # the lines that were there already say nothing of their end
        return (counted[last] - counted[first]) / (last - first) / 2

    def end(self) -> None:
        """End all processes of the job."""
        super().end()
        deadline = time.monotonic() + 10
        while self._members() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _group(self, rank: list[str], further: dict[str, str]) -> list[subprocess.Popen[str]]:
        a = self._hosts.a
        port = str(next(PORTS))
        group = {"MASTER_ADDR": a.address, "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": LINK}
        group |= further
        return [self._start(number, rank, RANK=str(number), **group) for number in range(2)]

    def _start(self, number: int, command: list[str], **further: str) -> subprocess.Popen[str]:
        host = (self._hosts.a, self._hosts.b)[number]
        variables = {**self._variables, **further}
        return host.popen(
            command, cwd=HERE.parent, environment=variables, stdout=self._output, stderr=subprocess.STDOUT
        )

    def _members(self) -> list[int]:
        mark = f"{MARK}={self._variables[MARK]}".encode()
        found = []
        for pid in self._hosts.a.processes() | self._hosts.b.processes():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def _signal(self, number: int) -> None:
        for pid in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).send_signal(number)
        if number != signal.SIGSTOP:  # `nsenter`, outside, has stopped with what it started
            for process in self._processes:
                process.send_signal(number)
