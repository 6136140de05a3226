"""The jobs that recovery.py disturbs: ours, stock Horovod's elastic, torchrun; each of two ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from common import HERE
from jobs import environment
from recovery_marks import STEP, Mark, of_ours, of_peer
from recovery_peer import CLIP, EVERY, MICRO_BATCH, PASSES

RANKS = 2
PATIENCE_S = 300

T = TypeVar("T")


class ElasticJob:
    """One contender's job, that runs from now on.

    Args:
        name: one of `COMMANDS`.
        folder: for what it writes; empty.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._journal, self._events = folder / "run" / "journal.jsonl", folder / "events"
        self._output = (folder / "output.txt").open("w+")
        command = COMMANDS[name](folder)
        self._process = subprocess.Popen(
            command,
            env=environment(**VARIABLES.get(name, {})),
            cwd=HERE.parent,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def marks(self) -> list[Mark]:
        """What is known so far."""
        return of_ours(self._journal, self._events) if self.name == "ours" else of_peer(self._folder)

    def until(self, found: Callable[[list[Mark]], T | None], patience_s: float = PATIENCE_S) -> T:
        """Wait for something in the marks.

        Errors:
            TimeoutError: it does not come, or the job has ended.
        """
        deadline = time.monotonic() + patience_s
        while (value := found(self.marks())) is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._output.seek(0)
                raise TimeoutError(f"{self.name} does not go on:\n{self._output.read()[-4000:]}")
            time.sleep(0.2)
        return value

    def kill_rank_1(self) -> float:
        """SIGKILL; the time of it."""
        victim = self._rank_1()
        now = time.time()
        victim.kill()
        return now

    def end(self) -> None:
        """End all processes of the job."""
        try:
            everybody = [*psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            everybody = []
        self._process.kill()
        for process in everybody:
            if process.is_running():
                process.kill()
        psutil.wait_procs(everybody, timeout=10)
        self._process.wait()
        self._output.close()

    def _rank_1(self) -> psutil.Process:
        if self.name != "ours":
            marks = sorted(self.marks(), key=lambda mark: mark.time)
            return psutil.Process([m.pid for m in marks if m.kind == STEP and m.rank == 1][-1])
        ranks = [p for p in psutil.Process(self._process.pid).children(recursive=True) if _is_rank(p)]
        leads = [any(file.path == str(self._journal) for file in p.open_files()) for p in ranks]
        assert sorted(leads) == [False, True], f"the journal is open in {sum(leads)} of {len(ranks)} ranks"
        return ranks[leads.index(False)]


def _is_rank(process: psutil.Process) -> bool:
    return process.cmdline()[1:3] == ["-m", "hvdtrain"]


def _ours(folder: Path) -> list[str]:
    options = {
        "run_dir": folder / "run",
        "train.steps": 1_000_000,
        "train.micro_batch": MICRO_BATCH,
        "train.global_batch": MICRO_BATCH * PASSES,
        "train.clip": CLIP,
        "train.eval_every": 1_000_000,
        "train.eval_samples": 4,
        "checkpoint.every": EVERY,
    }
    launch = [sys.executable, "-m", "hvdtrain", "launch", "-np", str(RANKS), "--elastic", f"1:{RANKS}"]
    return [
        *launch,
        "--events",
        str(folder / "events"),
        "--",
        *(f"--{name}={value}" for name, value in options.items()),
    ]


def _stock(folder: Path) -> list[str]:
    script = folder / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    script.chmod(0o700)
    launch = ["horovodrun", "--gloo", "-np", str(RANKS), "--min-np", "1", "--max-np", str(RANKS)]
    launch += ["--host-discovery-script", str(script), "--network-interface", "lo"]
    # By default a host with a dead slot is never used again.
    return [*launch, "--blacklist-cooldown-range", "1", "2", *_peer("stock", folder)]


def _torchrun(folder: Path) -> list[str]:
    launch = ["torchrun", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "10"]
    return [*launch, *_peer("torchrun", folder)[1:]]


def _peer(name: str, folder: Path) -> list[str]:
    return [sys.executable, str(HERE / "recovery_peer.py"), name, str(folder)]


VARIABLES = {"torchrun": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
"""Without it the processes that start anew may read the addresses of those before from the store that they share with
torchrun, and wait for them for half an hour (seen with torch 2.13 in two of three restarts)."""

COMMANDS: dict[str, Callable[[Path], Sequence[str | os.PathLike[str]]]] = {
    "ours": _ours,
    "stock": _stock,
    "torchrun": _torchrun,
}
