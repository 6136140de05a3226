"""Repeat steps of a run with the same bits on one rank, or find where two such runs part.

The journal has the numbers of each step, a hash of each micro-batch, and now and then one of each tensor. So the first
step that differs is found by comparing journals, without a search by repeated training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from hvdtrain.compare.comparison import differing, differing_options
from hvdtrain.compare.read import RunRecord, read_run
from hvdtrain.data.order import count_micro_batches, positions_without, take_micro_batches
from hvdtrain.errors import ConfigError, HvdtrainError, listed
from hvdtrain.observe.past_journal import read_events, read_steps
from hvdtrain.plan.plan import BITS
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.training.diagnostics.drift import MOST_PASSES
from hvdtrain.verify.epochs import order_of
from hvdtrain.verify.resume import read_config, run_logged
from hvdtrain.verify.starts import find_windows, read_starts
from hvdtrain.yaml_file import yaml_text

_COMPARED = ("position", "tokens", "lr", "loss", "grad_norm", "skipped")
"""Values of a step that have equal bits where the gradient, the samples and the parameters have."""
_FACTS = ("versions", "machine", "size")
_DIGITS = 8
"""Of a hash in the journal."""
_MOST = 4
"""Micro-batches, tensors and samples to name."""


@dataclass(frozen=True)
class Difference:
    """Where two runs of the same steps part."""

    first: int  # the first step that both have
    last: int  # the last one
    step: int | None  # the first one with other bits; None if there is none
    values: Mapping[str, list[Any]]  # its values that differ, by name, of each run
    passes: list[str]  # micro-batches of this step that have another loss or weight, in words
    tensors: list[str]  # names of the tensors that differ after this step, if the journals have their hashes
    options: Mapping[str, list[Any]]  # those of the runs that differ
    facts: Mapping[str, list[Any]]  # versions, machine and number of ranks that differ

    def lines(self) -> list[str]:
        """Return what to print."""
        if self.step is None:
            return [f"steps {self.first:,} to {self.last:,} have the same bits"]
        lines = [f"step {self.step:,} differs: " + _text(self.values)] if self.values else []
        if self.passes:
            lines.append(f"another loss or weight: {listed(self.passes, _MOST)}")
        elif "grad_norm" in self.values and "loss" not in self.values:
            lines.append("the loss is the same: a backward pass or an exchange differs")
        if self.tensors:
            lines.append(f"after step {self.step:,}, other bits in: {listed(self.tensors, _MOST)}")
        if self.step > self.first:
            lines.insert(0, f"steps {self.first:,} to {self.step - 1:,} have the same bits")
        for what, found in (("options", self.options), ("facts", self.facts)):
            if found:
                lines.append(f"other {what}: {_text(found)}")
        if not self.options and not self.facts:
            lines.append(
                "options, versions and machines are equal: a sample of the data set, a processor or memory may differ"
            )
        return lines


def find_difference(one: Path, other: Path) -> Difference:
    """Compare the steps that two runs have. Errors: HvdtrainError: a folder has no run, or they have no common step."""
    runs = [read_run(path) for path in (one, other)]
    for run in runs:
        _check_bits(run.options.get("train.reproducible"), run.path)
    steps = [read_steps(RunLayout(run.path).journal) for run in runs]
    common = sorted(steps[0].keys() & steps[1].keys())
    if not common:
        raise HvdtrainError(f"{one} and {other} have no step in common")
    hashes = [_tensor_hashes(run.path) for run in runs]
    for step in common:
        lines = [each[step] for each in steps]
        values = {name: [line.get(name) for line in lines] for name in _COMPARED}
        unequal = {name: pair for name, pair in values.items() if repr(pair[0]) != repr(pair[1])}
        passes = _unequal_passes(one, step, *(line.get("passes", "") for line in lines))
        tensors = [*differing([each[step] for each in hashes])] if all(step in each for each in hashes) else []
        if unequal or passes or tensors:
            return Difference(common[0], common[-1], step, unequal, passes, tensors, *_causes(runs))
    return Difference(common[0], common[-1], None, {}, [], [], *_causes(runs))


def _tensor_hashes(run: Path) -> dict[int, dict[str, str]]:
    """Return the hashes of tensors by step and name."""
    names: list[str] = []
    found = {}
    for event in read_events(RunLayout(run).journal, "parameters"):
        names = event.get("names", names)
        found[event["at_step"]] = dict(zip(names, wrap(event["hashes"], _DIGITS), strict=False))
    return found


def _unequal_passes(run: Path, step: int, one: str, other: str) -> list[str]:
    """Return the micro-batches of a step with unequal hashes; with rank and samples, if the run's ledger has them."""
    if one == other or len(one) != len(other):
        return []
    pairs = [*zip(wrap(one, _DIGITS), wrap(other, _DIGITS), strict=True)]
    wrong = [number for number, (mine, others) in enumerate(pairs) if mine != others]
    if len(wrong) == len(pairs) > 1:
        return ["each micro-batch"]
    windows = find_windows(read_starts(RunLayout(run).ledger)[0], step)
    start = next((window.start for window in windows if window.first < step <= window.last), None)
    used = {} if start is None else {rank: each.between(step - 1, step) for rank, each in start.entries.items()}
    begins = {int(begin): rank for rank, entries in used.items() for begin in entries.begins}
    if start is None or not begins:
        return [f"part {number + 1} of {len(pairs)} of the micro-batches" for number in wrong]
    header = start.header
    parts = positions_without(min(begins), header.global_batch, header.left_out)
    count = count_micro_batches(parts, header.micro_batch)
    batches, each = take_micro_batches(parts, header.micro_batch, range(count)), -(-count // MOST_PASSES)
    found = []
    for number in range(count):
        if number // each in wrong:
            batch = batches[number]
            rank = begins[max(begin for begin in begins if begin <= batch.start)]
            positions = np.arange(batch.start, batch.stop, dtype=np.int64)
            samples = (order_of(header).indices(positions) if header.samples else positions).tolist()
            place = f"rank {rank} on {start.entries[rank].header.host}"
            found.append(f"micro-batch {number + 1} of {count} ({place}, samples {listed(samples, _MOST)})")
    return found


def replay(run: Path, step: int | None, folder: Path, say: Callable[[str], None]) -> Difference:
    """Train from the newest checkpoint before a step to that step, on one rank, in an empty folder; then compare.

    Without a step, to the last one. `run` is only read.

    Errors: HvdtrainError: the run has no such step, or training fails.
    """
    config = read_config(run)
    _check_bits(config["train"].get("reproducible"), run)
    steps = read_steps(RunLayout(run).journal)
    last = max(steps, default=0) if step is None else step
    if last not in steps:
        raise ConfigError(
            f"{run} has no step {last}", expected=f"{min(steps, default=0)} to {max(steps, default=0)}", next_step=None
        )
    saved = [each for each in CheckpointStore(RunLayout(run).checkpoints, say).list() if each.step < last]
    before = max(saved, key=lambda each: each.step, default=None)
    sections: dict[str, dict[str, Any]] = {
        "train": {"stop_at": last, "verify_every": 0},
        "checkpoint": {"every": 0, "to": None},
        "observe": {"sinks": [], "timeline": "off", "profile": "off", "tensorboard": False},
    }
    changed = {name: {**config.get(name, {}), **values} for name, values in sections.items()}
    new, file = folder / "run", folder / "config.yaml"
    resume = "never" if before is None else str(before.path.absolute())
    text = yaml_text({**config, **changed, "run_dir": str(new), "resume": resume})
    file.write_text(text, encoding="utf-8")
    begin = 1 if before is None else before.step + 1
    say(f"steps {begin:,} to {last:,} again, on one rank, from {'the start' if before is None else before.path}")
    argv = [sys.executable, "-m", "hvdtrain", "train", "--config", str(file)]
    run_logged(argv, folder / "output.log", "the replay")
    return find_difference(run, new)


def _check_bits(reproducible: object, run: Path) -> None:
    if reproducible != BITS:
        raise ConfigError(
            f"{run} was trained without --train.reproducible {BITS}",
            expected="a run with the same bits on any number of ranks",
            next_step=f"hvdtrain verify resume {run} compares with a tolerance; hvdtrain compare shows curves",
        )


def _causes(runs: list[RunRecord]) -> tuple[Mapping[str, list[Any]], Mapping[str, list[Any]]]:
    """Return the options that differ and may matter, and the facts."""
    of_training = [
        {name: value for name, value in run.options.items() if not name.startswith(("observe.", "checkpoint."))}
        for run in runs
    ]
    options = differing_options(of_training)
    for name in ("train.stop_at", "train.verify_every"):
        options.pop(name, None)
    return options, differing([{name: run.started.get(name) for name in _FACTS} for run in runs])


def _text(pairs: Mapping[str, list[Any]]) -> str:
    return "; ".join(f"{name} {one!r} and {other!r}" for name, (one, other) in pairs.items())
