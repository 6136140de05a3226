"""The findings of a run, or of a Timeline alone: problems, each with its number, its cost and what to try. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Finding
from hvdtrain.timeline.analysis.budget import ASIDE, IDLE, sample_of
from hvdtrain.timeline.analysis.findings_exchange import LITTLE_BYTES, RULES_OF_ACTIVATIONS, RULES_OF_EXCHANGES
from hvdtrain.timeline.analysis.findings_ranks import RULES_OF_RANKS, grown_waits
from hvdtrain.timeline.analysis.inputs import LEAST_MS, LEAST_SHARE, Facts
from hvdtrain.timeline.analysis.phases import (
    COPIES,
    NEGOTIATION,
    NEVER_CACHED,
    QUEUE,
    TRANSFER,
    count_steps,
    whole_collectives,
)
from hvdtrain.timeline.analysis.rank_steps import warm_up
from hvdtrain.timeline.analysis.straggler_causes import figures_of
from hvdtrain.timeline.columns import RunTrace
from hvdtrain.timeline.logs import STALLED
from hvdtrain.timeline.whatif.evidence import Change

_ASIDE_SHARE, _FINE = 0.1, 0.02
"""Of the time: evaluations and checkpoints that are reported, and that are not too many."""
_MUCH = 0.2
"""Share of the wall time of a Timeline alone."""
_START_SHARE, _START_MS = 0.1, 1000.0
"""Per step, of a usual step, and in all, ms: a smaller start-up is not reported."""
_NEAR = 0.05
"""Of a run: a rank that turned slow so shortly before or after is the reason of a change."""
_FEW, _MANY = 10, 50
WRONG_BITS = "wrong_bits"
"""Kind of a finding: without a cost, and worse than any."""
_TURNS_WITH_TICKS = 5


def find(facts: Facts, others: Sequence[tuple[Facts, float]] = ()) -> list[Finding]:
    """Return all findings: wrong bits first, then the most costly; unknown costs last.

    Of `others`, starts with their shares of the steps of the run, it is what matters about their ranks.
    """
    rules = [*RULES_OF_RANKS, *RULES_OF_ACTIVATIONS, _wrong_ranks, _stalls, _start_up, _changes]
    if facts.run.steps is not None and facts.budget is not None:
        rules += [*RULES_OF_EXCHANGES, _input, _collections, _aside, _cores]
    elif facts.budget is not None:
        rules.append(_of_timelines)
    every = [found for rule in rules for found in rule(facts)]
    for other, share in others:
        for found in (found for rule in RULES_OF_RANKS for found in rule(other)):
            cost = (found.cost_ms or 0.0) * share
            if found.kind == "straggler" or cost >= max(LEAST_MS, LEAST_SHARE * facts.step_ms):
                every.append(replace(found, text=f"{wording.start_of(other.blame)}: {found.text}", cost_ms=cost))
    return sorted(every, key=lambda finding: (finding.kind != WRONG_BITS, -(finding.cost_ms or 0.0)))


def _start_up(facts: Facts) -> Iterator[Finding]:
    """Report a start-up that takes much of the time."""
    found, journal = facts.start_up, facts.run.journal
    if found is None or journal is None:
        return
    cost, first = found.extra_ms / journal.count, wording.counted(found.steps, "step")
    if cost >= _START_SHARE * found.usual_ms and found.extra_ms >= _START_MS:
        longer = f"took {wording.ms(found.extra_ms / 1e3)} s longer than later ones"
        text = f"start-up: the first {first} {longer}, which take {wording.ms(found.usual_ms)} ms"
        advice, waited = "it counts less in a longer run", None
        if (table := facts.run.steps) is not None:
            early = np.flatnonzero(table.step <= journal.step[found.steps - 1]).astype(np.int32)
            waited = figures_of(table, early, "cpu_wait_us", np.nansum)
        if waited is not None and 2 * np.nanmedian(waited) / 1e3 >= found.extra_ms:
            advice = f"ranks waited for CPU cores then: {facts.for_cores()}"
        elif facts.option("train", "compile"):
            advice += "; torch.compile compiles again for each new shape of a batch"
        yield Finding("start_up", text, cost, advice)


def _changes(facts: Facts) -> Iterator[Finding]:
    """Report stretches of longer steps, unless a straggler was the reason."""
    journal = facts.run.journal
    near = _NEAR * journal.count if journal is not None else 0.0
    turns = [step for spell in facts.blame.spells for step in (spell.first_step, spell.last_step)]
    for change in facts.changes:
        turned = change.last_step if change.begins else change.first_step
        if any(abs(turned - step) <= near for step in turns):
            continue
        when = f"in steps {change.first_step:,} to {change.last_step:,}"
        when = f"since step {change.first_step:,}" if change.lasts else when
        when = f"until step {change.last_step:,}" if change.begins else when
        parts = ", ".join(f"{part} {wording.ms(ms)} ms more" for part, ms in change.parts_ms.items())
        with_it = f"; {'; '.join(change.coincided)}" if change.coincided else ""
        text = (
            f"steps took longer {when}: {wording.ms(change.step_ms)} instead of {wording.ms(change.usual_ms)} ms"
            f"{f' ({parts})' if parts else ''}{with_it}"
        )
        advice = "look at the machine metrics of that time in TensorBoard: clocks, temperatures, other load"
        if max(change.parts_ms, key=lambda part: change.parts_ms[part], default="") == "wait":
            advice = "look at the network of that time: its speed, its errors, other traffic"
            table, steps = facts.run.steps, range(change.first_step, change.last_step + 1)
            if (grown := grown_waits(table, [*steps])) is not None and grown[0] > grown[1]:
                advice = f"the others waited for {grown[2]} then: see what it did, and its host"
            elif table is not None and len(set(table.hosts)) == 1:
                advice = "look at what else ran on this host then: its ranks exchange within it"
        yield Finding("change", text, (change.step_ms - change.usual_ms) * change.share, advice)


def _input(facts: Facts) -> Iterator[Finding]:
    """Report the wait for data, and copying it to the device."""
    waited, copied = _fed_ms(facts)
    if waited >= LEAST_SHARE * facts.step_ms:
        workers = facts.option("loader", "workers") or 0
        text = f"waiting for data takes {facts.per_step(waited)}"
        advice = f"use more loader processes: --loader.workers {max(1, 2 * int(workers))}"
        advice = facts.confirmed(advice, Change(data_ms=0.0), waited) or "no gain is predicted from faster loading"
        yield Finding("input", text, waited, advice)
    if copied >= LEAST_SHARE * facts.step_ms:
        text = f"copying batches to the device takes {facts.per_step(copied)}"
        advice = "copy fewer bytes: send integers or half precision, and convert them on the device"
        if facts.option("loader", "pin_memory") == "off":
            advice = "copy from page-locked memory, which does not block: --loader.pin_memory auto"
        yield Finding("copy", text, copied, advice)


def _fed_ms(facts: Facts) -> tuple[float, float]:
    """Return the wait for data and its copy to the device, without stragglers, which are reported on their own."""
    table = facts.run.steps
    assert table is not None
    usual = [rank for rank in range(len(table.hosts)) if rank not in facts.blame.late]
    data, copy = (float(np.nansum(table.parts_us[name][usual, warm_up(table) :])) for name in ("data", "copy"))
    share = copy / (data + copy) if data + copy > 0 else 0.0
    fed = [row.parts_ms.get("data", 0.0) for row in facts.blame.ranks if row.rank not in facts.blame.late]
    fed_ms = float(np.median(fed or [facts.ms("data")]))
    return fed_ms * (1 - share), fed_ms * share


def _collections(facts: Facts) -> Iterator[Finding]:
    table = facts.run.steps
    assert table is not None
    sample = sample_of(table)
    if len(sample.columns) < _FEW:  # the collection of a run's objects may be in any of them
        return
    # A collection on any rank delays all: the longest of each step counts.
    longest_ms = np.nan_to_num(table.parts_us["gc"][:, sample.columns]).max(axis=0) / 1e3
    ms = float(np.average(longest_ms, weights=sample.weights))
    if ms >= LEAST_SHARE * facts.step_ms:
        text = f"Python's garbage collector takes {facts.per_step(ms)} on the slowest rank"
        advice = "call gc.freeze() after creating model and data, or create fewer objects per step"
        yield Finding("gc", text, ms, advice)


def _aside(facts: Facts) -> Iterator[Finding]:
    """Report evaluations and checkpoints that take much of the time, with periods at which they take `_FINE` each."""
    share, journal = facts.share(ASIDE), facts.run.journal
    if share < _ASIDE_SHARE:
        return
    shares = {ASIDE: share}
    start = facts.run.start
    first, last = start.first_step or 0, start.last_step
    at_steps = [(event.get("at_step"), event.get("seconds")) for event in start.events_named("evaluation")]
    between = [seconds for at, seconds in at_steps if isinstance(at, int) and first <= at < last]
    known = [float(seconds) for seconds in between if isinstance(seconds, (int, float))]
    if len(known) == len(between) and journal is not None:
        evaluations = min(share, 1e3 * sum(known) / journal.count / facts.step_ms)
        shares = {"evaluations": evaluations, "checkpoints": share - evaluations}
    saved_every = facts.option("checkpoint", "every")
    how = {
        "evaluations": ("--train.eval_every", facts.option("train", "eval_every") or saved_every),
        "checkpoints": ("--checkpoint.every", saved_every),
    }
    costly = {name: share for name, share in shares.items() if share >= _ASIDE_SHARE / 2}
    text = " and ".join(f"{name} take {share:.0%} of the time" for name, share in costly.items())
    fewer = [f"{how[n][0]} {math.ceil(how[n][1] * s / _FINE)}" for n, s in costly.items() if n in how and how[n][1]]
    gain_ms = facts.step_ms * sum(share - _FINE for share in costly.values())
    less = f"{' '.join(fewer)}, {wording.ms(gain_ms)} ms less per step"
    advice = f"run them less often: {less}" if fewer else "run them less often"
    if "checkpoints" not in costly:
        advice += ", or evaluate fewer samples: --train.eval_samples 16"
    yield Finding("aside", text, facts.ms(ASIDE), advice)


def _cores(facts: Facts) -> Iterator[Finding]:
    if (waited := facts.core_wait_ms()) is not None:
        yield Finding("cpu", f"ranks waited for a CPU core for {facts.per_step(waited)}", waited, facts.for_cores())


def _wrong_ranks(facts: Facts) -> Iterator[Finding]:
    """Report ranks that another rank has found wrong (``--train.verify_every``)."""
    named = [event for event in facts.run.start.events_named("wrong_rank") if isinstance(event.get("rank"), int)]
    for rank in sorted({event["rank"] for event in named}):
        own = [event for event in named if event["rank"] == rank]
        where = ", ".join(f"{name} {own[-1][name]}" for name in ("host", "gpu", "cores") if name in own[-1])
        text = f"rank {rank} ({where}) had wrong bits {wording.counted(len(own), 'time')}, last at step "
        advice = "take it out of the next job and test it; with --train.verify_every, a sample of the passes is checked"
        yield Finding(WRONG_BITS, f"{text}{own[-1].get('at_step')}", None, advice)


def _stalls(facts: Facts) -> Iterator[Finding]:
    lines = [line for line in facts.run.warnings if line.startswith(STALLED)]
    if lines:
        more = f"; and on {wording.counted(len(lines) - 1, 'more rank')}" if len(lines) > 1 else ""
        text = f"{lines[0][:160]}{more}"
        yield Finding("stall", text, None, "all ranks must call the same collectives; the line names the missing ranks")


def _of_timelines(facts: Facts) -> Iterator[Finding]:
    """Yield findings of Timelines without a run. They do not show what backward hides, so costs are unknown."""
    assert facts.budget is not None
    shares, communication = {part.name: part.share for part in facts.budget.parts}, facts.communication
    yield from _cache(facts.run)
    waits = shares.get(NEGOTIATION, 0.0)
    if waits >= _MUCH:
        text = f"{waits:.0%} of the time is negotiation alone: ranks are not ready, or wait for a cycle"
        advice = "do a short run with HOROVOD_CACHE_CAPACITY=0, which records when ranks are ready; then repeat this"
        if facts.blame.source == "ticks":
            advice = "find the straggler; without one, use a shorter cycle: HOROVOD_CYCLE_TIME=0.5"
        yield Finding("negotiation", text, None, advice)
    if shares.get(QUEUE, 0.0) >= _MUCH:
        text = f"tensors only wait in Horovod's queue or for their data during {shares[QUEUE]:.0%} of the time"
        yield Finding("queue", text, None, "on GPUs they wait for backward to produce them; no setting changes that")
    if shares.get(COPIES, 0.0) >= _MUCH / 4:
        text = f"copies into and out of the fusion buffer take {shares[COPIES]:.0%} of the time"
        advice = "flat buckets need no copies: import hvdtrain.torch as hvd instead of horovod.torch"
        yield Finding("fusion_copies", text, None, advice)
    if shares.get(TRANSFER, 0.0) >= _MUCH:
        rate = communication.bus_gb_per_s if communication else None
        at = f" at a bus bandwidth of {wording.speed(rate)}" if rate else ""
        text = f"transfers take {shares[TRANSFER]:.0%} of the time{at}; this file does not show how much backward hides"
        sent = communication.bytes_per_step if communication else None
        advice = "send less: compression=hvd.Compression.fp16 in DistributedOptimizer"
        if sent is not None and sent < LITTLE_BYTES:
            advice = f"only {wording.nbytes(sent)} per step: latency dominates; look for ranks that wait for CPU cores"
        yield Finding("transfer", text, None, advice)
    yield from _small_tensors(facts.run)
    if shares.get(IDLE, 0.0) >= 1 - _MUCH / 4:
        text = f"nothing is exchanged during {shares[IDLE]:.0%} of the time: communication is not the bottleneck"
        yield Finding("idle", text, None, "profile the program itself: torch.profiler, or hvdtrain's own timeline")


def _cache(run: RunTrace) -> Iterator[Finding]:
    """Report a response cache that is too small: later steps have ticks too, which full negotiation writes."""
    for trace in run.horovod:
        steps = count_steps(trace)
        if not len(trace.tick_tensor) or steps <= 2 * _TURNS_WITH_TICKS:
            continue
        ranks = int(trace.tick_rank.max()) + 1
        turns = np.bincount(trace.tick_tensor, minlength=len(trace.tensors)) / ranks
        cached = [not name.startswith(NEVER_CACHED) for name in trace.tensors]
        full = int(np.sum(cached & (turns > max(_TURNS_WITH_TICKS, steps / 2))))
        if full:
            text = f"{full} tensors were negotiated in full in every step: Horovod's response cache is too small"
            advice = f"HOROVOD_CACHE_CAPACITY={max(2048, 2 * len(trace.tensors))}, unless it was 0 on purpose"
            yield Finding("cache", text, None, advice)
            return


def _small_tensors(run: RunTrace) -> Iterator[Finding]:
    steps = sum(map(count_steps, run.horovod))
    sizes = [trace.nbytes[whole_collectives(trace) & (trace.nbytes >= 0)] for trace in run.horovod]
    count = sum(map(len, sizes))
    mean = float(np.mean(np.concatenate(sizes))) if count else 0.0
    if steps and count / steps >= _MANY and mean < LITTLE_BYTES:
        text = f"{count / steps:.0f} tensors per step are exchanged, of {mean / 1e3:.0f} kB on average"
        advice = "use fewer, larger collectives: HOROVOD_CYCLE_TIME=5 collects longer; or import hvdtrain.torch as hvd"
        yield Finding("small_tensors", text, None, advice)
