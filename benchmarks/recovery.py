"""One of two ranks is killed by SIGKILL: how long until training goes on, beside stock Horovod's elastic and torchrun?

All train the default language model on this machine, two ranks of one thread, a global batch of 2 x 4 samples that
stays what it is when one rank is left, which then does twice the work a step.

- Ours: `hvdtrain launch --elastic 1:2`. The survivor goes on with the state that it holds: no step is lost. A
  checkpoint each 10 steps, which the recovery does not need. A replacement is started and taken in when it is ready.
- Stock: `horovodrun --host-discovery-script`, on two hosts that are this machine, since the host of a dead rank is put
  on a blacklist (for 1 to 2 s here; for good by default). A commit of `TorchState` each 10 steps (its own examples:
  each 100); the survivor goes back to it, the steps since are done again. A replacement is waited for as it starts.
- torchrun: DDP over Gloo, `--max-restarts`, a store of its own for each start (`VARIABLES`). All
  processes are ended and start anew, at full size, from a checkpoint each 10 steps; the steps since are done again.

In turns, each job anew, with the kill after four of the ten steps, at another point of the fifth each time. Three times
count: until training goes on (`before_step`), to the end of the first step (`seconds`), and until a step is done that
had not been done before (`passed`). `recovery_marks` says what the parts are. Also: how long training stands still
while a replacement joins, beyond what a step takes (`standstill`), and when it is whole again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from common import HERE, Figure, T, figure, main, ratios
from jobs import environment
from recovery_marks import STEP, Mark, Recovery, Return, come_back, kill_at, of_ours, of_peer, split
from recovery_peer import CLIP, EVERY, MICRO_BATCH, PASSES

RANKS = 2
PATIENCE_S = 300
KILL_AFTER = EVERY + EVERY // 2 - 1
RETURN_S = 60
PARTS = ("seconds", "detect_s", "rendezvous_s", "restore_s", "step_s", "before_step_s", "passed_s", "lost_steps")
COMPARED = {"seconds": "", "before_step_s": "/before_step", "passed_s": "/passed"}

Found = dict[str, list[tuple[Recovery, Return | None]]]
"""Of each contender, round by round; nothing of a return to full size where there was none."""


class ElasticJob:
    """The job of one contender of `COMMANDS`, which runs from now on."""

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


def disturbed(name: str, phase: float) -> tuple[Recovery, Return | None]:
    """Start a job, kill its rank 1 at that part of a step, watch."""
    with tempfile.TemporaryDirectory() as folder:
        job = ElasticJob(name, Path(folder))
        try:
            ends = job.until(ends_of_enough)
            time.sleep(kill_at(ends, phase, time.time))
            killed_s = job.kill_rank_1()
            found = job.until(lambda marks: split(marks, killed_s))
            if name == "torchrun":
                return found, None  # all of it started anew
            try:
                return found, job.until(lambda marks: come_back(marks, killed_s, RANKS), RETURN_S)
            except TimeoutError:
                return found, None
        finally:
            job.end()


def ends_of_enough(marks: list[Mark]) -> list[float] | None:
    """When steps ended, once there are as many as the kill waits for."""
    ends: dict[int, float] = {}
    for mark in sorted(marks, key=lambda m: m.time):
        if mark.kind == STEP:
            ends.setdefault(mark.step, mark.time)
    return list(ends.values()) if max(ends, default=0) >= KILL_AFTER else None


def measure(quick: bool) -> list[Figure]:
    rounds = 2 if quick else 5
    found: Found = {name: [] for name in COMMANDS}
    for number in range(rounds):
        for name in COMMANDS:
            found[name].append(disturbed(name, (number + 0.5) / rounds))
    return [*seconds(found), *compared(found)]


def seconds(found: Found) -> list[Figure]:
    figures = []
    for name, results in found.items():
        prefix = "recovery/" if name == "ours" else f"recovery/{name}_"
        figures += [
            figure(prefix + part, [getattr(r, part) for r, _ in results], "steps" if part == "lost_steps" else "s")
            for part in PARTS
        ]
        back = [r for _, r in results if r is not None]
        if back:
            figures.append(figure(f"{prefix}standstill_s", [r.standstill_s for r in back], "s"))
            figures.append(figure(f"{prefix}whole_s", [r.whole_s for r in back], "s"))
    return figures


def compared(found: Found) -> list[Figure]:
    figures = []
    pairs = [(ours, stock) for (_, ours), (_, stock) in zip(found["ours"], found["stock"], strict=True)]
    whole = [ours.standstill_s / stock.standstill_s for ours, stock in pairs if ours is not None and stock is not None]
    if whole:
        figures.append(figure("recovery/vs_stock/standstill", whole, "x"))
    for peer in ("stock", "torchrun"):
        for part, suffix in COMPARED.items():
            ours, theirs = ([getattr(r, part) for r, _ in found[name]] for name in ("ours", peer))
            figures.append(figure(f"recovery/vs_{peer}{suffix}", ratios(ours, theirs), "x"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
