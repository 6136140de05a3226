"""Check that an interrupted run equals an uninterrupted one, by training again in a scratch folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from hvdtrain.engine.saved_exchange import has_mean_residuals
from hvdtrain.errors import ConfigError, HvdtrainError, RunDirectoryError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.programs import end_group
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.yaml_file import yaml_text

LOSS_TOLERANCE = 1e-4
"""Relative tolerance of losses in fp32: another world size sums in another order."""

TENSOR_TOLERANCE = 1e-2
"""Tolerance relative to a tensor's L2 norm. If a gradient is near 0, adaptive optimizers amplify its last bits."""


@dataclass(frozen=True)
class Outcome:
    """The losses and positions of a run by step, from 1, and its last checkpoint."""

    losses: list[float | None]
    positions: list[int]
    state: StateDict


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    name: str
    exact: bool  # compared bit for bit, otherwise with a tolerance
    steps: int  # number of compared losses
    tensors: int  # number of compared tensors
    loss: float  # largest relative difference of a loss
    tensor: float  # largest difference of a tensor, relative to its norm
    first: str | None  # the first difference beyond the tolerance; None if there is none


def compare(name: str, found: Outcome, wanted: Outcome, *, exact: bool) -> Comparison:
    """Compare losses, positions and the last state of two runs of the same steps."""
    differences = [_relative(a, b) for a, b in zip(found.losses, wanted.losses, strict=False)]
    # Residuals of compression depend on the world size.
    tensors = dict(_tensors(found, wanted, ("model", "optimizer", *(["exchange"] if exact else []))))
    most = 0.0 if exact else LOSS_TOLERANCE
    first = _first_step(found, wanted, differences, most)
    if first is None:
        most = 0.0 if exact else TENSOR_TOLERANCE
        tail = f", more than {most:g}" if most else ""
        wrong = ((key, how) for key, how in sorted(tensors.items()) if not how <= most)
        first = next((f"tensor {key}: differs by {how:.3g} of its norm{tail}" for key, how in wrong), None)
    if first is None and exact:
        first = _first_value(found.state.values, wanted.state.values)
    return Comparison(
        name, exact, len(differences), len(tensors), max(differences, default=0.0), max(tensors.values()), first
    )


def _first_step(found: Outcome, wanted: Outcome, differences: list[float], most: float) -> str | None:
    for step, (a, b) in enumerate(zip(found.positions, wanted.positions, strict=False), 1):
        if a != b:
            return f"step {step} ended at position {a} instead of {b}"
    if len(found.positions) != len(wanted.positions):
        return f"{len(found.positions)} steps instead of {len(wanted.positions)}"
    for step, how in enumerate(differences, 1):
        if not how <= most:
            return f"step {step}: loss {found.losses[step - 1]!r} instead of {wanted.losses[step - 1]!r}"
    return None


def _first_value(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> str | None:
    for name in sorted(found.keys() | wanted.keys()):
        a, b = found.get(name), wanted.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            inner = _first_value(a, b, f"{prefix}{name}.")
            if inner is not None:
                return inner
        elif a != b:
            return f"{prefix}{name} is {str(a)[:60]} instead of {str(b)[:60]}"
    return None


def _tensors(found: Outcome, wanted: Outcome, groups: Sequence[str]) -> Iterator[tuple[str, float]]:
    ours, theirs = found.state.tensors, wanted.state.tensors
    for group in groups:
        a, b = ours.get(group, {}), theirs.get(group, {})
        for name in a.keys() | b.keys():
            yield f"{group}: {name}", _distance(a.get(name), b.get(name))


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the distance relative to the L2 norm of `b`: 0 only for equal bits, inf for other shapes or dtypes."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(_bits(a), _bits(b)):
        return 0.0
    difference = float((a.double() - b.double()).norm())
    norm = float(b.double().norm())
    return max(difference / norm if norm else difference, 1e-300)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _relative(a: float | None, b: float | None) -> float:
    if a == b:
        return 0.0
    if a is None or b is None:
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b))


_TAIL = 12
"""Lines of a failed job to show."""

_PATIENCE_S = 30.0
"""Seconds for a job to end after SIGTERM. mpirun gives its ranks one second, and is slow on few cores."""


def read_config(run: Path) -> dict[str, Any]:
    """Read the resolved config of a run.

    Errors: RunDirectoryError: there is none, or a program passed its task as an object.
    """
    try:
        config = RunLayout(run).read_config()
    except ConfigError as error:
        raise RunDirectoryError(error.what, next_step="name the folder of a run that has begun") from None
    task = config.get("task")
    if not isinstance(task, str) or task == "Task" or task.startswith("__main__:"):
        raise RunDirectoryError(
            f"a program passed the task of {run} as an object, so no command line can train it",
            expected="a task by name, file.py:function or module:function",
            found=str(task),
            next_step="put the task into a function in a file, and name it: --task file.py:function",
        )
    return config


def verify_resume(
    resolved: Mapping[str, Any], folder: Path, steps: int, sizes: Sequence[int], say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Train with a config in `folder`, interrupted and not, on each number of ranks and across them, and compare.

    `resolved` is as `read_config` returns it, `folder` is empty, `steps` are those of each half.

    Errors: HvdtrainError: a job failed.
    """
    config = _scratch_config(resolved, steps)
    file = RunLayout(folder).config
    file.write_text(yaml_text(config), encoding="utf-8")
    runner = _Runner(folder, file, steps, say)
    wholes = {}
    for size in sizes:
        wholes[size] = runner.whole(f"whole-{size}", size)
        half = runner.half(f"half-{size}", size)
        if size > 1 and has_mean_residuals(half.state):
            say(
                f"{size} ranks save the mean of their residuals, because those of all ranks are larger than the rest of"
                " the checkpoint: a resume is not bit for bit, so it is not compared"
            )
            continue
        rest = runner.rest(f"resumed-{size}", f"half-{size}", size, size)
        title = f"{steps} + {steps} on {size} rank(s) against {2 * steps}"
        yield compare(title, rest, wholes[size], exact=True)
    compression = config.get("parallel", {}).get("compression", "none")
    if compression != "none":
        if len(sizes) > 1:
            say(f"the error of {compression} depends on the number of ranks: no comparison across numbers of ranks")
        return
    precision, of = config.get("precision", "fp32"), ""
    if precision != "fp32" and len(sizes) > 1:
        say(f"across numbers of ranks all is trained in fp32: the rounding of {precision} would hide lost state")
        runner.options, of = ("--precision", "fp32"), "-fp32"
        for size in sizes:
            wholes[size] = runner.whole(f"whole-{size}{of}", size)
            runner.half(f"half-{size}{of}", size)
    for before, after in [pair for a, b in pairwise(sizes) for pair in ((a, b), (b, a))]:
        rest = runner.rest(f"resized-{before}-{after}", f"half-{before}{of}", before, after)
        title = f"{steps} on {before} + {steps} on {after} against {2 * steps} on {before}"
        yield compare(title, rest, wholes[before], exact=False)


def _scratch_config(config: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the config for 2 * `steps` steps with a checkpoint every `steps`, without recording or sinks.

    It replaces compression auto by none, because auto could choose differently each time.
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
class _Runner:
    """Starts runs of one config under a folder. `steps`: of each half. `say`: shows each finished run.

    `options` are added to the command line of each run.
    """

    folder: Path
    config: Path
    steps: int
    say: Callable[[str], None]
    options: Sequence[str] = ()

    def whole(self, name: str, size: int) -> Outcome:
        """Train all steps without interruption, and without a save."""
        return self._run(name, size, f"{2 * self.steps} steps without interruption", "--checkpoint.every", "0")

    def half(self, name: str, size: int) -> Outcome:
        """Train the first half of the steps."""
        return self._run(name, size, f"the first {self.steps} steps", "--train.stop_at", str(self.steps))

    def rest(self, name: str, half: str, before: int, size: int) -> Outcome:
        """Resume the run `half` of `before` ranks on `size` ranks, and train the second half."""
        shutil.copytree(self.folder / half, self.folder / name)
        return self._run(name, size, f"the other {self.steps} steps after {self.steps} on {before} rank(s)")

    def _run(self, name: str, size: int, what: str, *options: str) -> Outcome:
        run = self.folder / name
        options = ("--config", str(self.config), "--run_dir", str(run), *self.options, *options)
        program = ["hvdtrain", *([] if size == 1 else ["launch", "-np", str(size), "--"])]
        began = time.monotonic()
        argv = [sys.executable, "-m", *program, *options]
        run_logged(argv, self.folder / f"{name}.log", f"{what} on {size} rank(s)")
        self.say(f"{what} on {size} rank(s): {time.monotonic() - began:.1f} s")
        steps = read_steps(RunLayout(run).journal)
        newest = CheckpointStore(RunLayout(run).checkpoints, self.say).load_newest()
        assert newest is not None
        lines = [steps[step] for step in sorted(steps)]
        return Outcome([line["loss"] for line in lines], [line["position"] for line in lines], newest[1])


def run_logged(argv: list[str], log: Path, what: str) -> None:
    """Run a job to its end, with its output in a file. Errors: HvdtrainError: it failed; with its last lines."""
    with log.open("ab") as out:
        code = _wait_for(argv, out)
    if code:
        tail = log.read_text(errors="replace").splitlines()[-_TAIL:]
        raise HvdtrainError(
            f"{what} failed with exit code {code}",
            found="\n    ".join(["the end of its output:", *tail]),
            next_step=f"see the whole output: {log}",
        )


def _wait_for(argv: list[str], out: IO[bytes]) -> int:
    """Run a job to its end, and return its exit code. If the wait is interrupted, it ends the job first.

    The job is its own process group, because a launcher may end before the processes that it started.
    """
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException:
        end_group(process, _PATIENCE_S)
        raise
