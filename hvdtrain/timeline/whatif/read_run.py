"""Read the measurements of a run from its folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.files import read_regular
from hvdtrain.observe.past_journal import journal_lines, read_journal_starts
from hvdtrain.plan.gradients import Gradient
from hvdtrain.plan.plan import ENGINES, Plan, Ranks
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.analysis.rank_steps import STALL
from hvdtrain.timeline.analysis.shares import last_shares
from hvdtrain.timeline.steps import Start, read_starts
from hvdtrain.timeline.whatif.evidence import Evidence, Jitter, Job, median_parts, read_parts
from hvdtrain.timeline.whatif.fitting import fit_link
from hvdtrain.timeline.whatif.predict import wait_and_wire
from hvdtrain.timeline.wording import nbytes

VERSION = 1
_WARM_UP = 3
"""First steps of a start, which learn the buckets and warm up."""
_MIN_STEPS = 5
_MIN_PACKED_BYTES = 1 << 16
"""Packing a smaller gradient takes the time of calls, not of copying."""


def read_evidence(
    path: Path,
    accept: Callable[[Mapping[str, Any]], bool] = lambda step: True,
    *,
    lines: Iterable[Mapping[str, Any]] | None = None,
    start: Start | None = None,
) -> Evidence:
    """Read the measurements of a run.

    Args:
        path: folder of the run.
        accept: whether to use a step of the journal.
        lines: of the journal, if it was read already: at least some steps of the last start.
        start: the stamps of the last start, if they were read already.

    Errors:
        DataError: it is not a run, lacks a measurement, or is damaged.
        ConfigError: its compression does not exist.
    """
    with _explained(path):
        if lines is None:
            lines = journal_lines(RunLayout(path).journal)
        config = _read_config(path)
        engine, shard = _read_engine(path, config)
        profile = _read_profile(path)
        steps = _read_steps(path, accept, lines)
        start = start or next(reversed(read_starts(RunLayout(path).timeline.folder)), None)
        parallel, train = config["parallel"], config["train"]
        ranks, dimensions = Ranks(profile["size"], profile["local_size"]), Dimensions.of(parallel)
        starts, compression = read_journal_starts(RunLayout(path).journal), parallel["compression"]
        if compression == "auto":
            chosen = [event for each in starts for event in each.events_named("compression_chosen")]
            compression = chosen[-1]["compression"] if chosen else profile["compression"]
        mib = parallel.get("bucket_mib")
        plan = Plan(engine, str(parse(compression)), shard, dimensions=dimensions, bucket_mib=mib)
        last = last_shares([event for each in starts[-1:] for event in each.events_named("shares")], ranks.size)
        of_rank_0 = 1.0 if last is None else last.shares[0] * ranks.size / sum(last.shares)
        job = Job(ranks, plan, train["global_batch"], train["micro_batch"], of_rank_0)
        dimensions.check(ranks.size)
        if plan.shard != "none" and plan.compression != "none":
            raise DataError(
                f"{path} cannot be predicted: it used --parallel.shard {shard} with compression {plan.compression}",
                expected="a run without one of them",
                next_step="record 15 steps with --parallel.compression none",
            )
        gradients, tail_s, copy_s = _read_gradients(profile)
        compute_s, late_s, late_by_data_s = _times_of_ranks(start, steps)
        # The median of steps does not see that data come late in some of them only.
        rare_s = _beyond_median([[step["data"] for step in steps]], usual_s := median(step["step"] for step in steps))
        rare_of_ranks_s = max(rare_s, 0.0 if start is None else _beyond_median(_data_s(start, steps), usual_s))
        evidence = Evidence(
            path=path,
            job=job,
            cores=profile["cores"],
            own_cores=profile["own_cores"],
            threads=profile["threads"],
            on_cpu=profile["device"] == "cpu",
            gradients=gradients,
            tail_s=tail_s,
            step_s=usual_s + rare_of_ranks_s,
            parts_s=(parts_s := median_parts(steps)) | {"data": parts_s["data"] + rare_s},
            step_uncertainty_s=_uncertainty_s([step["step"] for step in steps]),
            jitter=Jitter.from_times(compute_s),
            # Others pack between the marks of two gradients.
            copy_s_per_byte=(copy_s if engine == "horovod" and not dimensions.divides_model else None)
            or _copied(profile),
            notes=list(_notes(profile)),
            late_s=late_s + rare_of_ranks_s - rare_s,
            late_by_data_s=late_by_data_s + rare_of_ranks_s - rare_s,
        )
        cpu_us = profile.get("exchange_cpu_us") if engine == "horovod" else None  # of Horovod's threads
        cpu_s = None if cpu_us is None else cpu_us * 1e-6
        return replace(evidence, fitted=fit_link(evidence, start.link if start else (), cpu_s, wait_and_wire))


def read_gradients(path: Path) -> tuple[list[Gradient], Ranks]:
    """Read the gradients of a run, in the model's order, and its ranks. Errors: DataError: it has not recorded them."""
    with _explained(path):
        profile = _read_profile(path)
        return _read_gradients(profile)[0], Ranks(profile["size"], profile["local_size"])


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors from a damaged run into one that says so."""
    try:
        yield
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"{path} is damaged, or was written by another program",
            expected="config.yaml, journal.jsonl and timeline/, as training writes them to its run_dir",
            found=f"{type(error).__name__}: {error}",
            next_step="use the folder of another run",
        ) from error


def _uncertainty_s(steps: Sequence[float]) -> float:
    """Return half of the 95% interval of the median step: its standard error, and how much the run drifted."""
    low, high = np.quantile(steps, (0.25, 0.75))
    error = 1.96 * 1.25 * (high - low) / 1.35 / math.sqrt(len(steps))
    half = len(steps) // 2
    drift = abs(median(steps[:half]) - median(steps[-half:]))
    return float(math.hypot(error, drift))


def _read_engine(path: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return engine and shard of a run, if the model knows them and the run recorded what it needs.

    Errors: DataError: otherwise.
    """
    parallel, dimensions = config["parallel"], Dimensions.of(config["parallel"])
    engine, shard = parallel.get("engine", "horovod"), parallel.get("shard", "none")
    is_whole = (engine, shard) == ("horovod", "none") and dimensions.virtual_stages == 1
    options = f"--parallel.engine {engine} --parallel.shard {shard}"
    if dimensions.divides_model and not is_whole:
        options += f" {dimensions.options}"
        expected = "--parallel.engine horovod --parallel.shard none, without virtual stages"
        next_step = "measure the change, and compare both runs: hvdtrain compare"
    elif engine == "fsdp":
        expected = "a run with " + " or ".join(f"--parallel.engine {name}" for name in ENGINES if name != "fsdp")
        next_step = f"record 15 steps with --parallel.engine horovod, and predict from them: --engine {engine}"
    else:
        return engine, shard
    what = f"a run with {options} does not record when backward finishes each gradient"
    raise DataError(f"{path} cannot be predicted: {what}", expected=expected, next_step=next_step)


def _notes(profile: Mapping[str, Any]) -> Iterator[str]:
    if sparse := (profile["plan"] or {}).get("sparse"):
        yield f"{len(sparse)} sparse gradient(s) are treated as dense"
    if frozen := profile.get("frozen_bytes"):
        yield f"{nbytes(frozen)} of frozen parameters are not in the model; FSDP would gather them, too"
    if profile["device"] != "cpu":
        yield "coding is counted as work of the computing stream, but on a GPU it has its own stream"


def _times_of_ranks(
    start: Start | None, steps: Sequence[Mapping[str, float]]
) -> tuple[NDArray[np.float64], float, float]:
    """Return seconds of computing [ranks, steps]; how much later than rank 0 the slowest rank is ready, and by data.

    If the other ranks are unknown, the times are those of rank 0 alone.
    """
    alone = np.array([[step["step"] - step["wait"] for step in steps]])
    if start is None:
        return alone, 0.0, 0.0
    known = np.isin(start.steps.step, [step["number"] for step in steps])
    ready_us = start.steps.ready_us[:, known]
    everyone = (ready_us - start.steps.start_us[:, known]) * 1e-6
    computed_us = ready_us - 1e6 * _data_s(start, steps)
    late_s, otherwise_s = (
        float(np.median(us.max(axis=0) - us[0])) * 1e-6 if us.size else 0.0 for us in (ready_us, computed_us)
    )
    return everyone if everyone.shape[1] >= _MIN_STEPS else alone, late_s, late_s - otherwise_s


def _data_s(start: Start, steps: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """Return how long each rank waited for data in the stamped ones of the steps [ranks, steps]."""
    known = np.isin(start.steps.step, [step["number"] for step in steps])
    return np.asarray(np.nan_to_num(start.steps.parts_us["data"][:, known]) * 1e-6)


def _beyond_median(times_s: ArrayLike, usual_s: float) -> float:
    """Return by how much the mean over steps of the largest time of a rank exceeds the median, without stalls."""
    times = np.minimum(np.asarray(times_s).max(axis=0), STALL * usual_s)
    return max(0.0, float(times.mean() - np.median(times))) if times.size else 0.0


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
    try:
        found: dict[str, Any] = orjson.loads(read_regular(file))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} lacks a readable {file.relative_to(path)}, the times at which backward finishes each gradient",
            expected="that file; rank 0 writes it at step 8 of a run, unless --observe.timeline is off",
            found=str(error),
            next_step=f"run 15 steps again: python -m hvdtrain --config {shlex.quote(str(RunLayout(path).config))}"
            " --run_dir NEW --train.stop_at 15",
        ) from None
    version = found.get("version") if isinstance(found, dict) else None
    if version != VERSION:
        what = f"{file} has format version {version}, and this hvdtrain reads {VERSION}"
        raise DataError(what, next_step="use the version of hvdtrain that wrote it")
    return found


def _read_steps(
    path: Path, accept: Callable[[Mapping[str, Any]], bool], lines: Iterable[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Return the parts of each step, and its "number": after the last start, warm-up and change of what ranks do."""
    found: list[dict[str, float]] = []
    warm = 0
    try:
        for line in lines:
            event = line.get("event")
            if event in ("started", "compression_chosen", "shares"):
                found.clear()
                warm = 0
            elif event is None and not line.get("skipped"):
                warm += 1
                if warm > _WARM_UP and accept(line):
                    found.append({**read_parts(line), "number": line["step"]})
    except OSError:
        raise DataError(f"{path} has no journal.jsonl", next_step="use the folder of a run") from None
    if len(found) < _MIN_STEPS:
        raise DataError(
            f"{path} has too few steps for a prediction",
            expected=f"{_MIN_STEPS} after the first {_WARM_UP} of its last start",
            found=str(len(found)),
            next_step="train longer",
        )
    return found


def _copied(profile: Mapping[str, Any]) -> float | None:
    """Return the seconds to copy a byte of parameters; None if the run has not measured it."""
    size, us = profile.get("copied") or (0, None)
    return us * 1e-6 / size if us and size else None


def _read_states(profile: Mapping[str, Any]) -> list[tuple[float, float] | None]:
    """Return the bytes of the optimizer's state by parameter.

    Of a parameter that other ranks update, nothing was recorded: it has what all others have, or is unknown.
    """
    found = [parameter.get("state_bytes") for parameter in profile["parameters"]]
    known = {(state[0], state[1]) for state in found if state is not None}
    same = next(iter(known)) if len(known) == 1 else None
    return [same if state is None else (state[0], state[1]) for state in found]


def _read_gradients(profile: Mapping[str, Any]) -> tuple[list[Gradient], float, float | None]:
    """Return the gradients in the model's order, backward after the last one, seconds to copy a byte.

    The copy is None if nothing was packed uncompressed.
    """
    steps = profile["steps"]
    found = []
    states, whole = _read_states(profile), not profile.get("by_element", True)
    for i, parameter in enumerate(profile["parameters"]):
        times_us = [(step["ready_us"][i], step["packed_us"][i]) for step in steps]
        ready_us = [ready for ready, _ in times_us if ready is not None]
        pack_us = [packed - ready for ready, packed in times_us if ready is not None and packed is not None]
        ready_s = median(ready_us) * 1e-6 if ready_us else None
        pack_s = median(pack_us) * 1e-6 if pack_us else 0.0
        shape = tuple(parameter["shape"])
        name, dtype, rows = parameter["name"], parameter["dtype"], parameter["rows"]
        summed_by = parameter.get("copies", profile["size"]) / profile["size"]
        found.append(Gradient(name, shape, dtype, ready_s, pack_s, rows, states[i], summed_by, whole))
    last = max((g.ready_s + g.pack_s for g in found if g.ready_s is not None), default=0.0)
    tail_s = max(0.0, median(step["backward_us"] for step in steps) * 1e-6 - last)
    copied = [g.pack_s / g.nbytes for g in found if g.pack_s and g.nbytes >= _MIN_PACKED_BYTES]
    uncompressed = profile["size"] > 1 and profile["compression"] == "none" and copied
    return found, tail_s, median(copied) if uncompressed else None
