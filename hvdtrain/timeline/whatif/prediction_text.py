"""A prediction as text and as data for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hvdtrain.plan.description import Held, held
from hvdtrain.timeline.whatif.evidence import Change, Evidence, Job
from hvdtrain.timeline.whatif.outer_exchange import RarePrediction
from hvdtrain.timeline.whatif.predict import Prediction
from hvdtrain.timeline.wording import ms, nbytes

VERSION = 1
HELD = "a rank holds: of trained parameters; activations, buckets under way and gathered blocks are not counted"
UNKNOWN = (
    "other jobs on the link, the hosts and the storage",
    "switches, and where hosts are connected to them",
    "how much slower ranks get if more of them share memory and caches",
    "how much slower data loads if more ranks read at once",
    "how many steps training needs: another compression or global batch may learn more slowly",
)
"""Effects that a run's measurements cannot show."""
MORE_SAMPLES = "workers that train apart need more samples for a loss than ranks that exchange in every step"


def lines(evidence: Evidence, change: Change, prediction: Prediction) -> list[str]:
    """Return the text."""
    now, then = prediction.now, prediction.then
    memory = [_held(evidence, job) for job in (evidence.job, prediction.job)]
    ratio = then.step_s / now.step_s
    of_now = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f} times"
    share = (prediction.high_s - prediction.low_s) / 2 / max(then.step_s, 1e-9)
    gather = ("parameter gather, exposed", _ms(now.gather_s), _ms(then.gather_s))
    changes_memory = memory[0] != memory[1]
    kinds = ["a rank holds: parameters", *(each.title for each in memory[0][1:])]
    rows = [
        ("", "now", "then"),
        ("step", _ms(now.step_s), _ms(then.step_s)),
        ("computing, packing, coding", _ms(now.compute_s), _ms(then.compute_s)),
        ("waiting for the exchange and other ranks", _ms(now.exposed_s), _ms(then.exposed_s)),
        *([gather] if now.gather_s or then.gather_s else []),
        ("exchange, hidden or exposed", _ms(now.wire_s), _ms(then.wire_s)),
        ("sent by a rank to collectives", nbytes(now.handed_bytes), nbytes(then.handed_bytes)),
        ("buckets", str(now.buckets), str(then.buckets)),
        *(zip(kinds, *(map(memory_text, each) for each in memory), strict=True) if changes_memory else []),
    ]
    wide = max(len(row[0]) for row in rows)
    return [
        f"{evidence.path}: {_job(evidence.job)}",
        f"what if: {change_options(change) or 'nothing changes'}: {_job(prediction.job)}",
        "",
        f"a step: {_ms(then.step_s)}, {of_now} of now;"
        f" 95% interval [{ms(prediction.low_s * 1e3)} .. {ms(prediction.high_s * 1e3)} ms] if the model holds"
        f" (+- {share:.0%})",
        f"samples per second: {evidence.job.global_batch / now.step_s:,.3g} now,"
        f" {prediction.job.global_batch / then.step_s:,.3g} then",
        "",
        *(f"  {name:<{wide}}  {before:>10}  {after:>10}" for name, before, after in rows),
        "",
        *(f"- {note}" for note in prediction.notes),
        *([f"- {HELD}"] if changes_memory else []),
        f"- not in the model: {'; '.join(UNKNOWN)}",
    ]


def as_data(evidence: Evidence, change: Change, prediction: Prediction) -> dict[str, Any]:
    """Return the data for programs, in seconds and bytes."""
    return {
        **_head(evidence, change),
        **asdict(prediction),
        "job": _job_data(prediction.job),
        "held_bytes": {
            name: {each.what: each.nbytes for each in _held(evidence, job)}
            for name, job in (("now", evidence.job), ("then", prediction.job))
        },
        "not_in_the_model": list(UNKNOWN),
    }


def rare_lines(evidence: Evidence, change: Change, found: RarePrediction) -> list[str]:
    """Return the text of a prediction for workers that train apart."""
    plan = found.plan
    share = found.every_step_bytes / found.sent_bytes if found.sent_bytes else math.inf
    each = f"{plan.fragments} fragments, one every {plan.interval} steps" if plan.fragments > 1 else "all parameters"
    rows = [
        ("step of a worker", _ms(found.inner_s)),
        (f"outer exchange, every {plan.interval} steps: collective", _ms(found.wire_s)),
        ("coding and update", _ms(found.coding_s)),
        ("both, not hidden", _ms(found.exposed_s)),
        ("sent in it by a rank that exchanges", nbytes(found.sent_bytes)),
        ("by fp32 all-reduces in these steps", f"{nbytes(found.every_step_bytes)} ({share:.0f} times as much)"),
    ]
    wide = max(len(name) for name, _ in rows)
    return [
        f"{evidence.path}: {_job(evidence.job)}",
        f"what if: {change_options(change)}: {_job(found.job)}, {plan.workers} workers; {each}, {plan.coding}",
        "",
        f"a step: {_ms(found.step_s)} (mean over rounds), {found.step_s / evidence.step_s:.2f} of now;"
        f" 95% interval [{ms(found.low_s * 1e3)} .. {ms(found.high_s * 1e3)} ms] if the model holds",
        "",
        *(f"  {name:<{wide}}  {value}" for name, value in rows),
        "",
        *(f"- {note}" for note in (*found.notes, MORE_SAMPLES)),
    ]


def rare_data(evidence: Evidence, change: Change, found: RarePrediction) -> dict[str, Any]:
    """Return the same for programs, in seconds and bytes."""
    return {**_head(evidence, change), **asdict(found), "job": _job_data(found.job)}


def change_options(change: Change) -> str:
    """Return the options that describe the change."""
    return " ".join(
        f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
        for name, value in _given(change).items()
    )


def _head(evidence: Evidence, change: Change) -> dict[str, Any]:
    return {"version": VERSION, "run": str(evidence.path), "change": _given(change)}


def _given(change: Change) -> dict[str, Any]:
    return {name: value for name, value in asdict(change).items() if value is not None}


def _job(job: Job) -> str:
    hosts = f"{job.ranks.hosts} host{'s' if job.ranks.hosts > 1 else ''}"
    plan = job.plan
    size = f" in buckets of {plan.bucket_mib:g} MiB" if plan.bucket_mib else ""
    engine = "" if plan.engine == "horovod" else f", engine {plan.engine}"
    shard = "" if plan.shard in ("none", "parameters") else f", shard {plan.shard}"
    mesh = f", {plan.dimensions.options}" if plan.dimensions else ""
    return (
        f"{job.ranks.size} rank{'s' if job.ranks.size > 1 else ''} on {hosts}{engine}{shard}{mesh},"
        f" compression {plan.compression}{size}, global batch {job.global_batch}"
    )


def _job_data(job: Job) -> dict[str, Any]:
    return {**{name: value for name, value in asdict(job).items() if name != "plan"}, **asdict(job.plan)}


def _held(evidence: Evidence, job: Job) -> list[Held]:
    return held(job.plan, evidence.gradients, job.ranks, job.passes)


def memory_text(each: Held) -> str:
    """Return the bytes of memory."""
    return "unknown" if each.nbytes is None else nbytes(each.nbytes)


def _ms(seconds: float) -> str:
    return f"{ms(seconds * 1e3)} ms"
