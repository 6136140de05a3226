"""Read the measurements of a run from its folder."""

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
from hvdtrain.errors import ConfigError, DataError, HvdtrainError
from hvdtrain.files import read_regular
from hvdtrain.observe.past_journal import journal_lines, read_events
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.read import read_horovod
from hvdtrain.timeline.steps import Start, read_starts
from hvdtrain.timeline.whatif.bucket_plan import Gradient
from hvdtrain.timeline.whatif.evidence import Evidence, Job, median_parts, read_parts
from hvdtrain.timeline.whatif.fitting import fit_link
from hvdtrain.timeline.whatif.jitter import Jitter
from hvdtrain.timeline.whatif.links import Ranks
from hvdtrain.timeline.whatif.predict import wait_and_wire

VERSION = 1
_WARM_UP = 3
"""First steps of a start, which learn the buckets and warm up."""
_MIN_STEPS = 5
_MIN_PACKED_BYTES = 1 << 16
"""Packing a smaller gradient takes the time of calls, not of copying."""
_WHOLE, _OPERATION = "ALLREDUCE", "_ALLREDUCE"
"""The phase that has the size, and the suffix of phases that carry an allreduce out: MPI_ALLREDUCE, NCCL_ALLREDUCE."""


def read_evidence(path: Path, accept: Callable[[Mapping[str, Any]], bool] = lambda step: True) -> Evidence:
    """Read the measurements of a run.

    Args:
        path: folder of the run.
        accept: whether to use a step of the journal.

    Errors:
        DataError: it is not a run, lacks a measurement, or is damaged.
        ConfigError: its compression does not exist.
    """
    try:
        return _read(path, accept)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path} is damaged, or was written by another program",
            expected="config.yaml, journal.jsonl and timeline/, as training writes them to its run_dir",
            found=f"{type(error).__name__}: {error}",
            next_step="use the folder of another run",
        ) from error


def _read(path: Path, accept: Callable[[Mapping[str, Any]], bool]) -> Evidence:
    config = _read_config(path)
    engine, shard = (config["parallel"].get(*default) for default in (("engine", "horovod"), ("shard", "none")))
    if (engine, shard) != ("horovod", "none"):
        raise DataError(
            f"{path} cannot be predicted: it used --parallel.engine {engine} with --parallel.shard {shard}",
            expected="--parallel.engine horovod with --parallel.shard none",
            next_step="record some steps with these options, and predict from them",
        )
    profile = _read_profile(path)
    steps = _read_steps(path, accept)
    if len(steps) < _MIN_STEPS:
        raise DataError(
            f"{path} has too few steps for a prediction",
            expected=f"{_MIN_STEPS} after the first {_WARM_UP} of its last start",
            found=str(len(steps)),
            next_step="train longer",
        )
    start = next(reversed(read_starts(path)), None)
    job = Job(
        Ranks(profile["size"], profile["local_size"]),
        _compression(path, config, profile),
        config["parallel"].get("bucket_mib"),
        config["train"]["global_batch"],
        config["train"]["micro_batch"],
    )
    gradients, tail_s, copy_s = _read_gradients(profile)
    compute_s, late_s = _times_of_ranks(start, steps)
    low, high = np.quantile([step["step"] for step in steps], (0.25, 0.75))
    evidence = Evidence(
        path=path,
        job=job,
        cores=profile["cores"],
        own_cores=profile["own_cores"],
        threads=profile["threads"],
        on_cpu=profile["device"] == "cpu",
        gradients=gradients,
        tail_s=tail_s,
        step_s=median(step["step"] for step in steps),
        parts_s=median_parts(steps),
        step_uncertainty_s=float(1.96 * 1.25 * (high - low) / 1.35 / np.sqrt(len(steps))),  # of a median
        jitter=Jitter.from_times(compute_s),
        copy_s_per_byte=copy_s,
        notes=_notes(profile),
        late_s=late_s,
    )
    cpu_us = profile.get("exchange_cpu_us")
    cpu_s = None if cpu_us is None else cpu_us * 1e-6
    fitted = fit_link(evidence, start.link if start else (), read_allreduces(path), cpu_s, wait_and_wire)
    return replace(evidence, fitted=fitted)


def _notes(profile: Mapping[str, Any]) -> list[str]:
    sparse = (profile["plan"] or {}).get("sparse")
    notes = [f"{len(sparse)} sparse gradient(s) are treated as dense"] if sparse else []
    if profile["device"] != "cpu":
        notes.append("coding is counted as work of the computing stream, but on a GPU it has its own stream")
    return notes


def _times_of_ranks(start: Start | None, steps: Sequence[Mapping[str, float]]) -> tuple[NDArray[np.float64], float]:
    """Return seconds of computing [ranks, steps], and how much later than rank 0 the slowest rank is ready.

    If the other ranks are unknown, the times are those of rank 0 alone.
    """
    alone = np.array([[step["step"] - step["wait"] for step in steps]])
    if start is None:
        return alone, 0.0
    known = np.isin(start.steps.step, [step["number"] for step in steps])
    ready_us = start.steps.ready_us[:, known]
    everyone = (ready_us - start.steps.start_us[:, known]) * 1e-6
    late_s = float(np.median(ready_us.max(axis=0) - ready_us[0])) * 1e-6 if ready_us.size else 0.0
    return everyone if everyone.shape[1] >= _MIN_STEPS else alone, late_s


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        return RunLayout(path).read_config()
    except ConfigError as error:
        raise DataError(
            f"{path} is not the folder of an hvdtrain run",
            expected="config.yaml and journal.jsonl, as training writes them to its run_dir",
            found=error.what,
            next_step="use the folder of a run; what-if needs more than a Horovod Timeline",
        ) from None


def _read_profile(path: Path) -> dict[str, Any]:
    file = RunLayout(path).timeline.gradients
    missing = DataError(
        f"{path} lacks {file.relative_to(path)}, the times at which backward finishes each gradient",
        expected="that file; rank 0 writes it at step 8 of a run, unless --observe.timeline is off",
        next_step=f"run 15 steps again: python -m hvdtrain --config {shlex.quote(str(RunLayout(path).config))}"
        " --run_dir NEW --train.stop_at 15",
    )
    try:
        found = orjson.loads(read_regular(file))
    except (OSError, ValueError):
        raise missing from None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise DataError(
            f"{file} has format version {found.get('version') if isinstance(found, dict) else None}, and this hvdtrain"
            f" reads {VERSION}",
            next_step="use the version of hvdtrain that wrote it",
        )
    return found


def _read_steps(path: Path, accept: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, float]]:
    """Return the parts of each step, and its "number": after the last start, warm-up and change of compression."""
    found: list[dict[str, float]] = []
    warm = 0
    try:
        for line in journal_lines(RunLayout(path).journal):
            event = line.get("event")
            if event in ("started", "compression_chosen"):
                found.clear()
                warm = 0
            elif event is None and not line.get("skipped"):
                warm += 1
                if warm > _WARM_UP and accept(line):
                    found.append({**read_parts(line), "number": line["step"]})
    except OSError:
        raise DataError(f"{path} has no journal.jsonl", next_step="use the folder of a run") from None
    return found


def _compression(path: Path, config: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    asked = config["parallel"]["compression"]
    if asked != "auto":
        return str(parse(asked))
    chosen = read_events(RunLayout(path).journal, "compression_chosen")
    return str(parse(chosen[-1]["compression"] if chosen else profile["compression"]))


def _read_gradients(profile: Mapping[str, Any]) -> tuple[list[Gradient], float, float | None]:
    """Return the gradients in the order in which they are ready, backward after the last one, seconds to copy a byte.

    The copy is None if nothing was packed uncompressed.
    """
    steps = profile["steps"]
    found = []
    for i, parameter in enumerate(profile["parameters"]):
        times_us = [(step["ready_us"][i], step["packed_us"][i]) for step in steps]
        ready_us = [ready for ready, _ in times_us if ready is not None]
        pack_us = [packed - ready for ready, packed in times_us if ready is not None and packed is not None]
        ready_s = median(ready_us) * 1e-6 if ready_us else None
        pack_s = median(pack_us) * 1e-6 if pack_us else 0.0
        shape = tuple(parameter["shape"])
        found.append(Gradient(parameter["name"], shape, parameter["dtype"], ready_s, pack_s, parameter["rows"]))
    # Gradients that backward skips come last, in the reverse of the model's order.
    found.reverse()
    order = sorted(found, key=lambda g: (g.ready_s is None, g.ready_s or 0.0))
    last = max((g.ready_s + g.pack_s for g in found if g.ready_s is not None), default=0.0)
    tail_s = max(0.0, median(step["backward_us"] for step in steps) * 1e-6 - last)
    copied = [g.pack_s / g.nbytes for g in found if g.pack_s and g.nbytes >= _MIN_PACKED_BYTES]
    uncompressed = profile["size"] > 1 and profile["compression"] == "none" and copied
    return order, tail_s, median(copied) if uncompressed else None


def read_allreduces(path: Path) -> list[tuple[int, float]]:
    """Return bytes and median seconds of allreduces in the newest window of a run; empty if none can be read."""
    files = sorted(RunLayout(path).timeline.folder.glob(TimelineLayout.HOROVOD), key=lambda file: file.stat().st_mtime)
    if not files:
        return []
    try:
        return _median_allreduces(read_horovod(files[-1]))
    except (HvdtrainError, OSError):
        return []


def _median_allreduces(trace: HorovodTrace) -> list[tuple[int, float]]:
    """Leave out the time that allreduces wait for late ranks."""
    sizes: dict[int, int] = {}
    seconds: dict[int, list[float]] = {}
    for tensor, phase, nbytes, us in zip(trace.tensor, trace.phase, trace.nbytes, trace.duration_us, strict=True):
        name = trace.phases[phase]
        if name == _WHOLE and nbytes > 0:
            sizes[int(tensor)] = int(nbytes)
        elif name.endswith(_OPERATION) and not name.startswith("NEGOTIATE"):
            seconds.setdefault(int(tensor), []).append(float(us) * 1e-6)
    found: dict[int, list[float]] = {}
    for tensor, durations in seconds.items():
        if tensor in sizes and np.isfinite(durations).all():
            found.setdefault(sizes[tensor], []).extend(durations)
    return [(size, median(durations)) for size, durations in sorted(found.items())]
