"""Predict a step of workers that train apart and exchange their changes every N steps. Pure.

A step is that of the ranks which serve one worker, as `predict` knows it, and its share of the outer exchange: coding,
the collective between workers, and the update of the shared parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.compression.coding_cost import COPY_S_PER_BYTE
from hvdtrain.compression.sizes import sent_bytes
from hvdtrain.compression.table import OuterKind, parse_outer
from hvdtrain.config.schema import Config, OuterConfig, ParallelConfig
from hvdtrain.config.sync import EVERY_STEP, OuterPlan, outer_plan
from hvdtrain.data.order import Workers
from hvdtrain.errors import ConfigError
from hvdtrain.plan.collectives import Collective, between_workers, workers_of
from hvdtrain.plan.plan import Ranks
from hvdtrain.timeline.whatif.assemble import Costs
from hvdtrain.timeline.whatif.evidence import Change, Evidence, Job, changed_job
from hvdtrain.timeline.whatif.links import collective_s
from hvdtrain.timeline.whatif.predict import changed_link, nothing_measured, predict

_COPIES = {"none": (0, 0), "bf16": (2, 2), "int8": (3, 1), "int4": (3, 2), "int2": (4, 3), "topk": (8, 1)}
"""Copies of fp32 values that encoding a change, and decoding one, cost. Measured on one thread of a CPU with 15 million
values, where a copy takes 18 ms."""
_OTHER_COPIES = (3, 8)
"""Of the changes of a worker, and of the update of the shared parameters."""
_UNCERTAINTY = 0.5
"""Of the cost of coding, as a share."""


@dataclass(frozen=True)
class RarePrediction:
    """A predicted step, a mean over rounds; seconds and bytes."""

    job: Job  # settings after the change
    plan: OuterPlan
    step_s: float  # the predicted one; `low_s` and `high_s` are its 95% interval, if the model holds
    low_s: float
    high_s: float
    inner_s: float  # of it, the step of a worker
    coding_s: float  # work of the training thread for one outer exchange
    wire_s: float  # the collective of one
    exposed_s: float  # the part of both that steps wait for
    sent_bytes: float  # that a rank which exchanges sends in one outer exchange
    every_step_bytes: float  # that all-reduces in fp32 send in as many steps, one in each
    notes: Sequence[str]  # what the prediction is based on


def plan_of(change: Change) -> OuterPlan:
    """Return the plan of `--sync`. Errors: ConfigError."""
    assert change.sync is not None
    if change.workers is not None and change.workers < 2:
        raise ConfigError("--workers is out of range", expected="2 or more", found=str(change.workers))
    parallel = ParallelConfig(sync=change.sync, workers=change.workers)
    found = outer_plan(Config(parallel=parallel, outer=OuterConfig(compression=change.outer_compression)))
    if found is None:
        raise ConfigError(
            f"--sync {EVERY_STEP} is the exchange in each step", next_step="omit it, or for example --sync diloco:32"
        )
    return found


def predict_rarely(evidence: Evidence, change: Change, costs: Costs = nothing_measured) -> RarePrediction:
    """Predict a step of workers that train apart.

    Errors: ConfigError: the change is invalid, or the run lacks a measurement that it needs.
    """
    plan, job = plan_of(change), changed_job(evidence, change)
    kind = parse_outer(plan.coding)
    if job.plan.engine_and_shard != ("horovod", "none"):
        engine, shard = job.plan.engine_and_shard
        raise ConfigError(
            f"--sync {change.sync} is not for --engine {engine} --shard {shard}",
            next_step="--engine horovod --shard none",
        )
    if job.micro_batches < plan.workers:
        raise ConfigError(
            f"{plan.workers} workers, but a step has only {job.micro_batches} micro-batch(es)",
            next_step=f"--global_batch {plan.workers * job.micro_batch}, or fewer workers",
        )
    workers = workers_of(plan, job.ranks.size)
    inner = predict(evidence, _of_worker(job, workers, change), costs)
    length = sum(math.prod(gradient.shape) for gradient in evidence.gradients)
    served, outer = workers.most_served, between_workers(plan, length, workers)
    leaders = outer.ranks
    wire_s, uncertainty_s, source = _wire(evidence, job, change, outer)
    coding_s = _coding_s(evidence, kind, length / plan.fragments, served, plan.workers)
    exposed_s = coding_s + max(0.0, wire_s - plan.delay * inner.then.step_s)
    step_s = inner.then.step_s + exposed_s / plan.interval
    spread_s = math.hypot((inner.high_s - inner.low_s) / 2, (uncertainty_s + _UNCERTAINTY * coding_s) / plan.interval)
    return RarePrediction(
        job=job,
        plan=plan,
        step_s=step_s,
        low_s=max(0.0, step_s - spread_s),
        high_s=step_s + spread_s,
        inner_s=inner.then.step_s,
        coding_s=coding_s,
        wire_s=wire_s,
        exposed_s=exposed_s,
        sent_bytes=sent_bytes({outer.kind: int(outer.nbytes)}, leaders),
        every_step_bytes=plan.interval * sent_bytes({"allreduce": 4 * length}, leaders),
        notes=[*inner.notes, *([f"link between workers: {source}"] if leaders > 1 else [])],
    )


def _of_worker(job: Job, workers: Workers, change: Change) -> Change:
    """Return the change to a job with only the ranks of the busiest worker, or only one rank."""
    own = replace(change, sync=None, workers=None, outer_compression=None)
    if job.ranks.size <= workers.count:
        share = sum(map(len, workers.shares(job.micro_batches, 0)))
        return replace(own, size=1, ranks_per_host=1, global_batch=share * job.micro_batch, bandwidth_gbit=None)
    size = len(workers.ranks_of(0))
    share = -(-job.micro_batches // workers.count)
    per_host = min(job.ranks.per_host, size)
    gbit = change.bandwidth_gbit if per_host < size else None
    return replace(own, size=size, ranks_per_host=per_host, global_batch=share * job.micro_batch, bandwidth_gbit=gbit)


def _wire(evidence: Evidence, job: Job, change: Change, outer: Collective) -> tuple[float, float, str]:
    """Return the seconds of the collective, their uncertainty, and what the link was derived from."""
    if outer.ranks == 1:
        return 0.0, 0.0, ""
    ranks = Ranks(outer.ranks, math.ceil(outer.ranks / job.ranks.hosts))
    link, share, source = changed_link(evidence, replace(job, ranks=ranks), change)
    seconds, _ = collective_s(link, ranks, outer.kind, outer.nbytes, change.algorithm or "auto")
    return seconds, share * seconds, source


def _coding_s(evidence: Evidence, kind: OuterKind, length: float, served: int, workers: int) -> float:
    encode, decode = _COPIES[kind.name]
    of_worker, of_update = _OTHER_COPIES
    copies = served * (encode + decode + of_worker) + workers * decode + of_update
    return 4 * length * copies * (evidence.copy_s_per_byte or COPY_S_PER_BYTE)
