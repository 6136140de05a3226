"""Faults at given places of elastic training, and what has become of the run: the kill matrix, a cell at a time."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.observe.past_journal import read_steps
from tests.support.chaos_rank import BALLAST, COPIES, PHASES, SIGNALS
from tests.support.journals import read_journal
from tests.support.launch import ENVIRONMENT, TIMEOUT_S
from tests.support.slurm import Slurm
from tests.support.two_hosts import TwoHosts, two_hosts
from tests.support.warm import warm_python

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("chaos_rank.py")
LAUNCH = """\
import json, sys
from hvdtrain.cli import launch, launch_spec
launch_spec._rank_program = lambda spec: json.loads(sys.argv[1])
sys.exit(launch.main(["--to", "hvdtrain", *sys.argv[2:]]))
"""
STEPS, STEP, LATE = 160, 12, 155
"""Of the run, the one that the fault befalls, and one that is so late that the run is over before the fault is."""

PACE_S = 0.04
"""That each step takes longer than it would, so that newcomers come back before the end."""

TASK = [
    f"--task={ROOT}/tests/support/toy.py:toy",
    "--train.global_batch=12",
    "--train.micro_batch=2",
    f"--train.steps={STEPS}",
    "--train.check_every=5",
    "--checkpoint.every=20",
    "--elastic.roll_back=non_finite",
    "--elastic.loss_s=0.2",
    "--observe.tensorboard=false",
]
AFTER_STEP = (COPIES, "commit", "checkpoint", "evaluation")
"""Phases that come after their step."""

DIVIDED = ("--parallel.shard=gradients",)
"""Options of a run whose ranks each have a part of the optimizer."""

START_S = 40
"""For which a first round waits for a host behind a cut link."""

FULL_S = 3.0
"""After which somebody makes room on a disk."""

_ROOM = "16m"
_FOUND = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
_ENVIRONMENT = {**ENVIRONMENT, **_FOUND}


@dataclass(frozen=True)
class Cell:
    """A fault of `chaos_rank.FAULTS` that befalls a rank in or after a step, in a phase of `chaos_rank.PHASES`."""

    fault: str
    phase: str
    size: int = 2
    hosts: int = 1
    rank: int = 1
    step: int = STEP
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What has become of a run.

    Attributes:
        struck: whether the fault came.
        code: exit code of the driver.
        sizes: of the rounds.
        lost_steps: steps without a line in the journal.
        worst: largest relative difference of a step's loss from the undisturbed run's.
        verified: what ``hvdtrain verify data`` says: "" where all is well.
        equal: parameters were equal on all ranks wherever that was looked at.
        to_next_step_s: from the fault to the end of the next step.
        pause_s: the longest between two steps from then on.
        said: lines of the driver.
    """

    struck: bool
    code: int
    sizes: list[int]
    lost_steps: list[int]
    worst: float
    verified: str
    equal: bool
    to_next_step_s: float | None
    pause_s: float | None
    said: str

    @property
    def faults(self) -> list[str]:
        """What is wrong; nothing where the law holds."""
        found = {
            "the fault never came": not self.struck,
            f"exit code {self.code}": self.code != 0,
            f"steps {self.lost_steps} are not in the journal": bool(self.lost_steps),
            f"losses differ by {self.worst:.1e}": not self.worst < 1e-5,
            f"verify data: {self.verified}": bool(self.verified),
            "parameters are not equal on all ranks": not self.equal,
        }
        return [text for text, holds in found.items() if holds]


def undisturbed(folder: Path, *options: str) -> dict[int, float]:
    """Losses by step of the same training by one rank, to which nothing happens."""
    run = folder / "undisturbed"
    command = [sys.executable, "-m", "hvdtrain", *TASK, *options, f"--run_dir={run}"]
    subprocess.run(command, env=_ENVIRONMENT, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S)
    return {step: line["loss"] for step, line in read_steps(run / "journal.jsonl").items()}


def run_cell(cell: Cell, folder: Path, expected: Mapping[int, float], slurm: Slurm | None = None) -> Outcome:
    """Train while it happens, in an empty folder; with `slurm`, in an allocation of two nodes.

    Two hosts and a disk of its own need root.

    Errors:
        UnavailableError: the hosts cannot be made.
    """
    with ExitStack() as stack:
        disk = stack.enter_context(_small_disk(folder)) if cell.fault == "disk full" else folder
        hosts = stack.enter_context(two_hosts()) if cell.hosts == 2 else None
        code = _run(cell, folder, disk, hosts, slurm)
        return _outcome(cell, folder, disk / "run", expected, code)


def _run(cell: Cell, folder: Path, disk: Path, hosts: TwoHosts | None, slurm: Slurm | None) -> int:
    order = folder / "order"
    facts = {"fault": cell.fault, "phase": cell.phase, "step": cell.step, "rank": cell.rank, "folder": str(disk)}
    order.write_text(json.dumps(facts))
    slots = f"a:{cell.size - cell.size // 2},b:{cell.size // 2}" if cell.hosts == 2 else f"localhost:{cell.size}"
    options = ["-np", str(cell.size), "--elastic", f"1:{cell.size}", "--events", str(folder / "events")]
    options += [] if slurm else ["-H", slots]
    if cell.fault == "link cut" and cell.phase == "start-up":
        options += ["--start-timeout", str(START_S)]
    train = [*TASK, *cell.options, f"--run_dir={disk / 'run'}"]
    rank = json.dumps([*_python(cell, hosts, slurm), str(RANK), str(order), str(PACE_S), *train])
    command = [sys.executable, "-c", LAUNCH, rank, *options]
    process: subprocess.Popen[Any]
    with _act(cell, order, disk, hosts), (folder / "said").open("w") as said:
        if slurm is not None:
            salloc = ["salloc", "--quiet", "--nodes=2", f"--ntasks={cell.size}", *command]
            given = {**slurm.variables, **_FOUND}
            process = slurm.first.popen(salloc, cwd=folder, environment=given, stdout=said, stderr=said)
        elif hosts is None:
            process = subprocess.Popen(command, cwd=folder, env=_ENVIRONMENT, stdout=said, stderr=said)
        else:
            process = hosts.a.popen(command, cwd=folder, environment=_FOUND, stdout=said, stderr=said)
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the driver, or what waits for it in the host's namespace
            return process.wait(TIMEOUT_S) or -1


def _python(cell: Cell, hosts: TwoHosts | None, slurm: Slurm | None) -> list[str]:
    """Return the words that start a rank: a fork, but where one that stops must stop what its agent knows."""
    if slurm is not None or cell.fault == "SIGSTOP":
        return [sys.executable]
    return warm_python() if hosts is None else hosts.warm_python()


def _outcome(cell: Cell, folder: Path, run: Path, expected: Mapping[int, float], code: int) -> Outcome:
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    lines = read_journal(run / "journal.jsonl") if (run / "journal.jsonl").exists() else []
    steps = {line["step"]: line for line in lines if "event" not in line}
    worst = max((abs(steps[s]["loss"] - loss) / abs(loss) for s, loss in expected.items() if s in steps), default=1.0)
    verify = [sys.executable, "-m", "hvdtrain", "verify", "data", str(run)]
    verified = subprocess.run(verify, env=_ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)
    done = Path(f"{folder / 'order'}.done")
    struck_s = done.stat().st_ctime if done.exists() else None  # of its renaming
    first = cell.step + (cell.phase in AFTER_STEP)
    times = [line["time"] for step, line in steps.items() if cell.phase == "start-up" or step >= first]
    to_next_step_s, pause_s = _times([line["time"] for line in steps.values()], times, struck_s)
    return Outcome(
        struck=struck_s is not None,
        code=code,
        sizes=[event["size"] for event in events if event["event"] == "round"],
        lost_steps=sorted(expected.keys() - steps.keys()),
        worst=worst,
        verified="" if verified.returncode == 0 else (verified.stdout + verified.stderr)[-1500:],
        equal=not any(line.get("event") == "failed" and line["error"] == "DriftError" for line in lines),
        to_next_step_s=to_next_step_s,
        pause_s=pause_s,
        said="\n".join(
            s for s in (folder / "said").read_text(errors="replace").splitlines() if s.startswith("hvdtrain")
        ),
    )


def _times(steps: list[float], next_ones: list[float], struck_s: float | None) -> tuple[float | None, float | None]:
    """From the fault to the end of the first of the next steps, and the longest between two steps from then on."""
    later = [time for time in next_ones if struck_s is not None and time > struck_s]
    if struck_s is None or not later:
        return None, None
    ends = sorted(time for time in steps if time > struck_s)
    ends = [max((time for time in steps if time <= struck_s), default=ends[0]), *ends]
    pauses = [b - a for a, b in itertools.pairwise(ends)]
    return round(min(later) - struck_s, 3), round(max(pauses), 3)


@contextmanager
def _act(cell: Cell, order: Path, disk: Path, hosts: TwoHosts | None) -> Iterator[None]:
    """Do what a rank cannot do to itself when it comes to the place, and undo it in the end."""
    over = threading.Event()

    def watch() -> None:
        done = Path(f"{order}.done")
        while not done.exists():
            if over.wait(0.002):
                return
        if cell.fault == "link cut":
            assert hosts is not None
            hosts.cut()
        elif cell.fault == "disk full":
            over.wait(FULL_S)
            with suppress(OSError):
                (disk / BALLAST).unlink()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    """A file system in a folder that is full soon. Needs root."""
    disk = Path(tempfile.mkdtemp(dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(disk)], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
        shutil.rmtree(disk, ignore_errors=True)


def cells() -> list[Cell]:
    """The whole matrix: a link can be cut between two hosts only. It befalls each rank in turn.

    With a divided optimizer, only ranks that are lost for good matter: it has a row of its own.
    """
    found = []
    for host in (1, 2):
        for size in (2, 3, 4):
            for fault in (*SIGNALS, "disk full", *(["link cut"] if host == 2 else [])):
                found += [Cell(fault, phase, size, host, (n + 1) % size) for n, phase in enumerate(PHASES)]
            found.append(Cell("disk full", "checkpoint", size, host, 1, LATE))
        for n, phase in enumerate((*PHASES, COPIES)):
            found.append(Cell("SIGKILL", phase, 3, host, (n + 1) % 3, options=DIVIDED))
    return found
