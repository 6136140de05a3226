"""Faults at given places of elastic training, and what has become of the run: the kill matrix, a cell at a time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.observe.journal import read_journal, read_steps
from tests.support.chaos_rank import BALLAST, PHASES, SIGNALS
from tests.support.launch import ENVIRONMENT
from tests.support.two_hosts import TwoHosts

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("chaos_rank.py")
LAUNCH = "import json, sys; from hvdtrain.cli.launch import main; sys.exit(main(sys.argv[2:], json.loads(sys.argv[1])))"
STEPS, STEP = 24, 12
"""Of the run, and the one that the fault befalls; an evaluation and a checkpoint come after every sixth."""

TASK = [
    f"--task={ROOT}/tests/support/toy.py:toy",
    "--train.global_batch=12",
    "--train.micro_batch=2",
    f"--train.steps={STEPS}",
    "--checkpoint.every=6",
    "--observe.tensorboard=false",
]
AFTER_STEP = ("commit", "checkpoint", "evaluation")
TIMEOUT_S = 120
_ROOM = "16m"


@dataclass(frozen=True)
class Cell:
    """A fault and its place.

    Attributes:
        fault: of `chaos_rank.FAULTS`.
        phase: of `chaos_rank.PHASES`.
        size: ranks at the start.
        hosts: 1 or 2.
        rank: which it befalls.
    """

    fault: str
    phase: str
    size: int = 2
    hosts: int = 1
    rank: int = 1


@dataclass(frozen=True)
class Outcome:
    """What has become of a run.

    Attributes:
        cell: the fault.
        struck: whether it came.
        code: exit code of the driver.
        sizes: of the rounds.
        lost_steps: steps without a line in the journal.
        worst: largest relative difference of a step's loss from the undisturbed run's.
        verified: what ``hvdtrain verify data`` says: "" where all is well.
        equal: parameters were equal on all ranks wherever that was looked at.
        to_next_step_s: from the fault to the end of the next step.
        said: lines of the driver.
    """

    cell: Cell
    struck: bool
    code: int
    sizes: list[int]
    lost_steps: list[int]
    worst: float
    verified: str
    equal: bool
    to_next_step_s: float | None
    said: str

    @property
    def faults(self) -> list[str]:
        """What is wrong; nothing where the law holds."""
        wrong = []
        if not self.struck:
            wrong.append("the fault never came")
        if self.code:
            wrong.append(f"exit code {self.code}")
        if self.lost_steps:
            wrong.append(f"steps {self.lost_steps} are not in the journal")
        if not self.worst < 1e-5:
            wrong.append(f"losses differ by {self.worst:.1e}")
        if self.verified:
            wrong.append(f"verify data: {self.verified}")
        if not self.equal:
            wrong.append("parameters are not equal on all ranks")
        return wrong

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def undisturbed(folder: Path) -> dict[int, float]:
    """Losses by step of the same training by one rank, to which nothing happens."""
    run = folder / "undisturbed"
    command = [sys.executable, "-m", "hvdtrain", *TASK, f"--run_dir={run}"]
    subprocess.run(command, env=_environment(), cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S)
    return {step: line["loss"] for step, line in read_steps(run / "journal.jsonl").items()}


def run_cell(cell: Cell, folder: Path, expected: Mapping[int, float], hosts: TwoHosts | None = None) -> Outcome:
    """Train while it happens.

    Args:
        cell: the fault; with 2 hosts these are needed.
        folder: an empty one.
        expected: losses of the undisturbed run.
        hosts: two of them, whose link is whole; where it is cut it is whole again at the end.
    """
    run, order = folder / "run", folder / "order"
    facts = {"fault": cell.fault, "phase": cell.phase, "step": STEP, "rank": cell.rank, "folder": str(folder)}
    order.write_text(json.dumps(facts))
    slots = f"a:{cell.size - cell.size // 2},b:{cell.size // 2}" if cell.hosts == 2 else f"localhost:{cell.size}"
    options = ["-np", str(cell.size), "--elastic", f"1:{cell.size}", "-H", slots, "--events", str(folder / "events")]
    rank = json.dumps([sys.executable, str(RANK), str(order), *TASK, f"--run_dir={run}"])
    command = [sys.executable, "-c", LAUNCH, rank, *options]
    with _act(cell, order, folder, hosts), (folder / "said").open("w") as said:
        process = (
            subprocess.Popen(command, cwd=folder, env=_environment(), stdout=said, stderr=said)
            if hosts is None
            else hosts.a.popen(command, cwd=folder, environment=_environment(), stdout=said, stderr=said)
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(30)
    return _outcome(cell, folder, expected, code)


def _outcome(cell: Cell, folder: Path, expected: Mapping[int, float], code: int) -> Outcome:
    run = folder / "run"
    events = [json.loads(line) for line in (folder / "events").read_text().splitlines()]
    lines = read_journal(run / "journal.jsonl") if (run / "journal.jsonl").exists() else []
    steps = {line["step"]: line for line in lines if "event" not in line}
    worst = max((abs(steps[s]["loss"] - loss) / abs(loss) for s, loss in expected.items() if s in steps), default=1.0)
    verify = [sys.executable, "-m", "hvdtrain", "verify", "data", str(run)]
    verified = subprocess.run(verify, env=_environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    struck_at = (folder / "struck").read_text() if (folder / "struck").exists() else ""
    next_step = STEP + (cell.phase in AFTER_STEP)
    later = [
        line["time"] for s, line in steps.items() if struck_at and s >= next_step and line["time"] > float(struck_at)
    ]
    return Outcome(
        cell=cell,
        struck=bool(struck_at),
        code=code,
        sizes=[event["size"] for event in events if event["event"] == "round"],
        lost_steps=sorted(expected.keys() - steps.keys()),
        worst=worst,
        verified="" if verified.returncode == 0 else (verified.stdout + verified.stderr)[-1500:],
        equal=not any(line.get("event") == "failed" and line["error"] == "DriftError" for line in lines),
        to_next_step_s=round(min(later) - float(struck_at), 3) if later else None,
        said="\n".join(s for s in (folder / "said").read_text().splitlines() if s.startswith(("hvdtrain", "Trace"))),
    )


@contextmanager
def _act(cell: Cell, order: Path, folder: Path, hosts: TwoHosts | None) -> Iterator[None]:
    """Note when the fault comes, do what a rank cannot do to itself, and undo it in the end."""
    over = threading.Event()

    def watch() -> None:
        done = Path(f"{order}.done")
        while not done.exists():
            if over.wait(0.002):
                return
        (folder / "struck").write_text(str(time.time()))
        if cell.fault == "link cut":
            assert hosts is not None
            hosts.cut()
        elif cell.fault == "disk full":
            over.wait(3.0)  # somebody makes room
            with suppress(OSError):
                (folder / BALLAST).unlink()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if hosts is not None:
            hosts.mend()


@contextmanager
def small_disk(parent: Path) -> Iterator[Path]:
    """A folder on a file system that is full soon. Needs root."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def cells(sizes: tuple[int, ...] = (2, 3, 4), hosts: tuple[int, ...] = (1, 2)) -> Iterator[Cell]:
    """The whole matrix: a link can be cut between two hosts only."""
    for host in hosts:
        for size in sizes:
            for phase in PHASES:
                yield from (Cell(fault, phase, size, host) for fault in (*SIGNALS, "disk full"))
                if host == 2:
                    yield Cell("link cut", phase, size, host)


def _environment() -> dict[str, str]:
    return {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}


Run = Callable[[Cell], Outcome]
