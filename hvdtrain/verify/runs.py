"""Runs of a config in a scratch folder: started, waited for, and read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import ConfigError, HvdtrainError, RunDirectoryError
from hvdtrain.observe import journal
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.train_state import StateDict

_TAIL = 12
"""Lines of a failed job that are shown."""

_PATIENCE_S = 30.0
"""How long a job may take to end when it is told to; mpirun gives its ranks a second, and is slow on few cores."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        losses: by step, from 1.
        positions: by step.
        state: its last checkpoint.
    """

    losses: list[float | None]
    positions: list[int]
    state: StateDict


def read_config(run: Path) -> dict[str, Any]:
    """The resolved config of a run.

    Errors:
        RunDirectoryError: there is none, or its task was given by a program.
    """
    try:
        config = RunLayout(run).read_config()
    except ConfigError as error:
        raise RunDirectoryError(error.what, next_step="give the folder of a run that has begun") from None
    task = config.get("task")
    if not isinstance(task, str) or task == "Task" or task.startswith("__main__:"):
        raise RunDirectoryError(
            f"the task of {run} was given by a program: no command line can train it",
            expected="a task by name, file.py:function or module:function",
            found=str(task),
            next_step="put the task into a function of a module, and name it: --task file.py:function",
        )
    return config


def scratch_config(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The same training of 2 `steps` steps, saved at each `steps`, with nothing shown or written elsewhere.

    Compression that is chosen by measurement could be chosen otherwise each time: it is none.
    """
    changed: dict[str, dict[str, Any]] = {
        "train": {"steps": 2 * steps, "epochs": None, "stop_at": None, "deterministic": True, "eval_every": None},
        "checkpoint": {"every": steps},
        "observe": {"sinks": [], "timeline": "off", "profile": "off", "nvtx": False, "tensorboard": False},
    }
    if config.get("parallel", {}).get("compression") == "auto":
        changed["parallel"] = {"compression": "none"}
    copied = {**config, "run_dir": None, "resume": "auto"}
    for section, values in changed.items():
        copied[section] = {**copied.get(section, {}), **values}
    return copied


@dataclass
class Runner:
    """Starts runs of one config under a folder.

    Attributes:
        folder: where they go.
        config: a file.
        steps: at which a first half stops.
        say: told of each run that is over.
    """

    folder: Path
    config: Path
    steps: int
    say: Callable[[str], None]

    def whole(self, name: str, size: int) -> Outcome:
        """Train all steps in one go."""
        self._run(name, size, f"{2 * self.steps} steps in one go")
        return self._outcome(name)

    def half(self, name: str, size: int) -> None:
        """Train the first half of the steps."""
        self._run(name, size, f"the first {self.steps} steps", "--train.stop_at", str(self.steps))

    def rest(self, name: str, half: str, before: int, size: int) -> Outcome:
        """Go on, on `size` ranks, from the first half that the run `half` has done on `before` ranks."""
        shutil.copytree(self.folder / half, self.folder / name)
        self._run(name, size, f"the other {self.steps} steps, after the first on {before} rank(s),")
        return self._outcome(name)

    def _run(self, name: str, size: int, what: str, *options: str) -> None:
        options = ("--config", str(self.config), "--run_dir", str(self.folder / name), *options)
        program = ["hvdtrain"] if size == 1 else ["hvdtrain.cli.start", "-np", str(size), "--"]
        log = self.folder / f"{name}.log"
        began = time.monotonic()
        with log.open("ab") as out:
            code = _wait_for([sys.executable, "-m", *program, *options], out)
        if code:
            lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
            raise HvdtrainError(
                f"{what} on {size} rank(s) failed with exit code {code}",
                found="\n    ".join(["the end of its output:", *lines]),
                next_step=f"all of it: {log}",
            )
        self.say(f"{what} on {size} rank(s): {time.monotonic() - began:.1f} s")

    def _outcome(self, name: str) -> Outcome:
        run = self.folder / name
        steps = journal.read_steps(RunLayout(run).journal)
        newest = CheckpointStore(RunLayout(run).checkpoints, self.say).load_newest()
        assert newest is not None
        lines = [steps[step] for step in sorted(steps)]
        return Outcome([line["loss"] for line in lines], [line["position"] for line in lines], newest[1])


def _wait_for(argv: list[str], out: IO[bytes]) -> int:
    """Run a job to its end; its exit code. Where the wait is interrupted, the job is ended first.

    It is a group of processes of its own: a launcher may stand between it and what it starts, and end before that.
    """
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a group of processes end, and wait until none of them is left."""
    end = time.monotonic() + _PATIENCE_S
    try:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            while time.monotonic() < end:
                process.poll()  # a zombie counts
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    finally:  # also when another signal comes meanwhile
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
