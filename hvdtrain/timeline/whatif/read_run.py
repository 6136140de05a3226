"""A run folder read as the evidence of predictions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.observe import journal
from hvdtrain.regular import read_regular
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.steps import Start, read_starts
from hvdtrain.timeline.whatif.bucket_plan import Gradient
from hvdtrain.timeline.whatif.evidence import Evidence, Fitted, Job
from hvdtrain.timeline.whatif.fitting import fit_link
from hvdtrain.timeline.whatif.jitter import Jitter
from hvdtrain.timeline.whatif.links import Ranks
from hvdtrain.timeline.whatif.predict import wait_and_wire
from hvdtrain.timeline.whatif.taken import taken

VERSION = 1
_WARM = 3
"""First steps of a start, which learn and warm up."""
_LEAST = 5
_PARTS = ("data", "copy", "forward", "backward", "wait", "clip", "optimizer")
_LEAST_PACKED = 1 << 16
"""Bytes of a gradient below which packing it is calls, not copying."""


def read_evidence(path: Path, accept: Callable[[Mapping[str, Any]], bool] = lambda step: True) -> Evidence:
    """What a run left.

    Args:
        path: its folder.
        accept: which of the journal's steps to go by.

    Errors:
        DataError: it is no run, lacks what a prediction needs, or is damaged.
        ConfigError: its compression is none that there is.
    """
    try:
        return _read(path, accept)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path} is damaged, or was written by another program",
            expected="config.yaml, journal.jsonl and timeline/ as training leaves them in its run_dir",
            found=repr(error),
            next_step="name the folder of another run",
        ) from error


def _read(path: Path, accept: Callable[[Mapping[str, Any]], bool]) -> Evidence:
    config = _config(path)
    seen = _gradients(path)
    steps = _steps(path, accept)
    if len(steps) < _LEAST:
        raise DataError(
            f"{path} has too few steps for a prediction",
            expected=f"{_LEAST} after the first {_WARM} of its last start",
            found=str(len(steps)),
            next_step="train a little longer",
        )
    parts = {name: median(step[name] for step in steps) for name in _PARTS}
    step_s = median(step["step"] for step in steps)
    parts["rest"] = max(0.0, step_s - sum(parts.values()))
    start = next(reversed(read_starts(path)), None)
    compute_s = _computing(start, steps)
    job = Job(
        Ranks(seen["size"], seen["local_size"]),
        _compression(path, config, seen),
        config["parallel"].get("bucket_mib"),
        config["train"]["global_batch"],
        config["train"]["micro_batch"],
    )
    gradients, tail_s, copy_s = _profile(seen)
    low, high = np.quantile([step["step"] for step in steps], (0.25, 0.75))
    made = Evidence(
        path=path,
        job=job,
        cores=seen["cores"],
        own_cores=seen["own_cores"],
        threads=seen["threads"],
        on_cpu=seen["device"] == "cpu",
        gradients=gradients,
        tail_s=tail_s,
        step_s=step_s,
        parts_s=parts,
        off_s=float(1.96 * 1.25 * (high - low) / 1.35 / np.sqrt(len(steps))),  # of a median
        compute_s=compute_s,
        jitter=Jitter.of(compute_s),
        fitted=Fitted(None, "nothing was exchanged", 0.0),
        copy_s_per_byte=copy_s,
        notes=_notes(seen),
        late_s=_late_s(start, steps),
    )
    cpu_us = seen.get("exchange_cpu_us")
    fitted = fit_link(
        made, start.link if start else (), taken(path), None if cpu_us is None else cpu_us * 1e-6, wait_and_wire
    )
    return replace(made, fitted=fitted)


def _notes(seen: Mapping[str, Any]) -> list[str]:
    sparse = (seen["plan"] or {}).get("sparse")
    notes = [f"{len(sparse)} sparse gradient(s) are taken for dense ones"] if sparse else []
    if seen["device"] != "cpu":
        notes.append("coding is taken for work of the stream that computes; on a GPU it has one of its own")
    return notes


def _computing(start: Start | None, steps: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """Seconds of computing of all ranks [ranks, steps], of rank 0 where no more is known."""
    alone = np.array([[step["step"] - step["wait"] for step in steps]])
    if start is None:
        return alone
    known = np.isin(start.steps.step, [step["number"] for step in steps])
    everyone = (start.steps.ready_us - start.steps.start_us)[:, known] * 1e-6
    return everyone if everyone.shape[1] >= _LEAST else alone


def _late_s(start: Start | None, steps: Sequence[Mapping[str, float]]) -> float:
    """By which the last rank is ready after rank 0."""
    if start is None:
        return 0.0
    ready_us = start.steps.ready_us[:, np.isin(start.steps.step, [step["number"] for step in steps])]
    return float(np.median(ready_us.max(axis=0) - ready_us[0])) * 1e-6 if ready_us.size else 0.0


def _config(path: Path) -> Mapping[str, Any]:
    try:
        return RunLayout(path).read_config()
    except ConfigError as error:
        raise DataError(
            f"{path} is no folder of a run of hvdtrain",
            expected="config.yaml and journal.jsonl, as training leaves them in its run_dir",
            found=error.what,
            next_step="name the run's folder; what-if needs more than a Timeline of Horovod's",
        ) from None


def _gradients(path: Path) -> dict[str, Any]:
    file = RunLayout(path).timeline.gradients
    missing = DataError(
        f"{path} lacks {file.relative_to(path)}: when backward has each gradient ready",
        expected="that file, written by rank 0 at step 8 of a run, unless --observe.timeline is off",
        next_step=f"run 15 steps of it anew: python -m hvdtrain --config {shlex.quote(str(RunLayout(path).config))}"
        " --run_dir NEW --train.stop_at 15",
    )
    try:
        found = orjson.loads(read_regular(file))
    except (OSError, ValueError):
        raise missing from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise DataError(
            f"{file} is of another version",
            expected=str(VERSION),
            found=str(found.get("version")) if isinstance(found, dict) else "no object",
            next_step="use the hvdtrain that wrote it",
        )
    return found


def _steps(path: Path, accept: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, float]]:
    """Seconds of the parts of each step of the last start, but its first ones; of one compression."""
    found: list[dict[str, float]] = []
    warm = 0
    try:
        for line in journal.journal_lines(RunLayout(path).journal):
            event = line.get("event")
            if event in ("started", "compression_chosen"):
                found.clear()
                warm = 0
            elif event is None and not line.get("skipped"):
                warm += 1
                if warm <= _WARM or not accept(line):
                    continue
                named = {name: line[f"{name}_s"] for name in _PARTS if name != "wait"}
                found.append({**named, "wait": line["exposed_comm_s"], "step": line["step_s"], "number": line["step"]})
    except OSError:
        raise DataError(f"{path} has no journal.jsonl", next_step="name the folder of a run") from None
    return found


def _compression(path: Path, config: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    chosen = [
        line["compression"]
        for line in journal.journal_lines(RunLayout(path).journal)
        if line.get("event") == "compression_chosen"
    ]
    asked = config["parallel"]["compression"]
    if asked != "auto":
        return str(parse(asked))
    return str(parse(chosen[-1] if chosen else seen["compression"]))


def _profile(seen: Mapping[str, Any]) -> tuple[list[Gradient], float, float | None]:
    """Gradients by the time at which they are ready, what of backward comes after the last, seconds to copy a byte."""
    steps = seen["steps"]
    ready = [_middle([step["ready_us"][i] for step in steps]) for i in range(len(seen["parameters"]))]
    packs = [
        _middle([_less(step["packed_us"][i], step["ready_us"][i]) for step in steps])
        for i in range(len(seen["parameters"]))
    ]
    found = [
        Gradient(p["name"], tuple(p["shape"]), p["dtype"], _s(at), _s(pack) or 0.0, p["rows"])
        for p, at, pack in zip(seen["parameters"], ready, packs, strict=True)
    ]
    # What backward leaves out comes last, in the reverse of the model's order.
    found.reverse()
    order = sorted(found, key=lambda g: (g.ready_s is None, g.ready_s or 0.0))
    last = max((g.ready_s + g.pack_s for g in found if g.ready_s is not None), default=0.0)
    tail_s = max(0.0, median(step["backward_us"] for step in steps) * 1e-6 - last)
    copied = [g.pack_s / g.nbytes for g in found if g.pack_s and g.nbytes >= _LEAST_PACKED]
    plain = seen["size"] > 1 and seen["compression"] == "none" and copied
    return order, tail_s, median(copied) if plain else None


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _less(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


def _s(us: float | None) -> float | None:
    return None if us is None else us * 1e-6
