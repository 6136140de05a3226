"""How far off are the predictions of `hvdtrain timeline whatif`, on configurations that nothing was fitted to?

A Llama of 15 million parameters, 4 x 128 tokens a micro-batch, SGD, ranks of 1 thread. Of one job, the base, is known
what any run leaves; others differ from it by what is asked. All are started and take turns of seconds (see jobs.py);
two equal jobs differ by some percent for as long as they live, so that is done twice. A figure is 100 (predicted /
measured - 1) of the two starts' mean of a median step; low and high are of each start. How fast the machine was in a
turn is seen in forward's passes, and told to the prediction: other work there is nothing that it could know of.

- one_host: 2 ranks on 2 cores without compression, and from it other sizes of buckets, other compressions;
- ranks: 1 rank, from it 2 on one host;
- engines: 2 ranks on 2 cores with AdamW and clipping, without a divided optimizer; from it the other engines, and from
  each of them that one again (not from fsdp, which does not record enough);
- meshes: 2 ranks that divide matrices, sequences or layers of the default language model (they cannot divide 5 heads);
  from 4 micro-batches in a step 8, and the reverse;
- unthrottled, 1gbit, 300mbit, 100mbit: 2 hosts of one core each (see tests/support/two_hosts.py; needs root), fitted to
  the base at the first rate alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from common import Figure, options, report
from host_jobs import HostsJob
from jobs import SGD, Job, Setting, take_turns, warmed_up

from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.predict import Prediction, predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.two_hosts import UnavailableError, two_hosts

PLAIN = Setting("llama15m", 4, optimizer=SGD, clip=0.0, ours={"observe.stall_timeout_s": 0})
BASE = "base"
WARM_UP = 9
"""Steps: after them the base has written what is read."""
STARTS = 2
LEAST = 3
"""Steps of a turn."""
RATES: Mapping[str, tuple[str | None, float | None, float, int]] = {
    "unthrottled": (None, None, 3.0, 3),
    "1gbit": ("1gbit", 1.0, 4.0, 2),
    "300mbit": ("300mbit", 0.3, 5.0, 2),
    "100mbit": ("100mbit", 0.1, 8.0, 1),
}
"""What `tc` calls it, Gbit/s, seconds of a turn, and rounds."""


@dataclass(frozen=True)
class Tried:
    """What differs, as options and as a question."""

    change: Change = field(default_factory=Change)
    ours: Mapping[str, object] = field(default_factory=dict)


TRIED: Mapping[str, Tried] = {
    BASE: Tried(),
    **{f"bucket_{mib}": Tried(Change(bucket_mib=mib), {"parallel.bucket_mib": mib}) for mib in (1, 4, 8, 32)},
    **{
        name.replace(":", "_"): Tried(Change(compression=name), {"parallel.compression": name})
        for name in ("fp16", "int8", "powersgd:4", "topk")
    },
}
ENGINES: Mapping[str, Tried] = {
    BASE: Tried(Change(engine="horovod", shard="none")),
    **{s: Tried(Change(engine="horovod", shard=s), {"parallel.shard": s}) for s in ("optimizer", "gradients")},
    **{name: Tried(Change(engine=name, shard="none"), {"parallel.engine": name}) for name in ("ddp", "fsdp")},
}
ADAMW = Setting("llama15m", 4, ours=PLAIN.ours)
QUICK = (BASE, "bucket_1", "int8", "powersgd_4")


@dataclass
class Turns:
    """What was seen of jobs that take turns."""

    jobs: Mapping[str, Job]

    def go(self, rounds: int, seconds: float) -> None:
        """Let the jobs run in turn; what was seen before is forgotten."""
        self._seen: dict[str, set[float]] = {name: set() for name in self.jobs}
        self.medians = take_turns(self.jobs, partial(self._turn, seconds=seconds), rounds)

    def _turn(self, job: Job, seconds: float) -> tuple[float, float]:
        """Medians of a step and of its forward passes."""
        steps: list[dict[str, float]] = []
        while len(steps) < LEAST:
            steps += job.turn(seconds)
        name = next(name for name, own in self.jobs.items() if own is job)
        self._seen[name] |= {step["time"] for step in steps}
        return statistics.median(s["step_s"] for s in steps), statistics.median(s["forward_s"] for s in steps)

    def evidence(self, name: str = BASE) -> Evidence:
        """What a job has left of the steps that were seen."""
        return read_evidence(self.jobs[name].folder, lambda step: step["time"] in self._seen[name])


def _setting(tried: Tried, plain: Setting = PLAIN) -> Setting:
    return replace(plain, ours={**plain.ours, **tried.ours})


def at_pace(evidence: Evidence, forward_s: float) -> Evidence:
    """The base had its forward pass taken so long: other work on the machine is nothing that a prediction is of."""
    parts = evidence.parts_s
    pace = forward_s / parts["forward"]
    computing = {name: parts[name] * pace for name in ("forward", "backward")}
    more_s = sum(computing.values()) - parts["forward"] - parts["backward"]
    return replace(evidence, parts_s={**parts, **computing}, step_s=evidence.step_s + more_s)


Pair = tuple[Prediction, float]
"""What was predicted, and seconds that were measured."""


def paired(evidence: Evidence, change: Change, medians: Sequence[tuple[float, float]]) -> Pair:
    step_s, forward_s = (statistics.median(column) for column in zip(*medians, strict=True))
    return predict(at_pace(evidence, forward_s), change), step_s


def compared(label: str, pairs: Sequence[Pair]) -> Figure:
    predicted_s, measured_s = fmean(found.then.step_s for found, _ in pairs), fmean(seconds for _, seconds in pairs)
    low_s, high_s = fmean(found.low_s for found, _ in pairs), fmean(found.high_s for found, _ in pairs)
    error = 100 * (predicted_s / measured_s - 1)
    print(
        f"{label:<26} predicted {predicted_s * 1e3:7.1f} ms [{low_s * 1e3:.0f} .. {high_s * 1e3:.0f}]"
        f"  measured {measured_s * 1e3:7.1f} ms {error:+5.1f} %{'' if low_s <= measured_s <= high_s else '  outside'}",
        flush=True,
    )
    errors = [100 * (found.then.step_s / seconds - 1) for found, seconds in pairs]
    return Figure(f"whatif/{label}", error, min(errors), max(errors), "%")


def here(names: Sequence[str], rounds: int) -> dict[str, Pair]:
    with warmed_up({name: partial(Job, "ours", _setting(TRIED[name])) for name in names}, WARM_UP) as jobs:
        turns = Turns(jobs)
        turns.go(rounds, 3.0)
        evidence = turns.evidence()
        _told(evidence)
        return {
            f"one_host/{name}": paired(evidence, TRIED[name].change, turns.medians[name])
            for name in names
            if name != BASE
        }


def more_ranks(rounds: int) -> dict[str, Pair]:
    """From 1 rank to 2, of the same global batch. That forward takes longer beside another rank is part of it."""
    alone = replace(PLAIN, ranks=1, passes=2)
    with warmed_up({BASE: partial(Job, "ours", alone), "two": partial(Job, "ours", PLAIN)}, WARM_UP) as jobs:
        turns = Turns(jobs)
        turns.go(rounds, 5.0)
        evidence = turns.evidence()
        _told(evidence)
        return {
            "ranks/1_to_2": (predict(evidence, Change(size=2)), statistics.median(s for s, _ in turns.medians["two"]))
        }


def engines(rounds: int) -> dict[str, Pair]:
    """From the base to the other engines, and back."""
    with warmed_up({n: partial(Job, "ours", _setting(tried, ADAMW)) for n, tried in ENGINES.items()}, WARM_UP) as jobs:
        turns = Turns(jobs)
        turns.go(rounds, 4.0)
        found: dict[str, Pair] = {}
        for source in [name for name in ENGINES if name != "fsdp"]:
            evidence = turns.evidence(source)
            _told(evidence)
            targets = [name for name in ENGINES if name != BASE] if source == BASE else [BASE]
            for name in targets:
                found[f"engines/{source}_to_{name}"] = paired(evidence, ENGINES[name].change, turns.medians[name])
        return found


def meshes(rounds: int) -> dict[str, Pair]:
    """From 4 micro-batches of a step to 8, and the reverse. Seconds are those of each job: their passes differ."""
    found: dict[str, Pair] = {}
    for name in ("tp", "cp", "pp"):
        divided = replace(PLAIN, model="default", ours={**PLAIN.ours, f"parallel.{name}": 2})
        passes = {"few": 2, "many": 4}
        starts = {size: partial(Job, "ours", replace(divided, passes=each)) for size, each in passes.items()}
        with warmed_up(starts, WARM_UP) as jobs:
            turns = Turns(jobs)
            turns.go(rounds, 4.0)
            for source, target in (("few", "many"), ("many", "few")):
                evidence = turns.evidence(source)
                _told(evidence)
                batch = divided.ranks * passes[target] * divided.micro_batch
                measured_s = statistics.median(seconds for seconds, _ in turns.medians[target])
                pair = predict(evidence, Change(global_batch=batch)), measured_s
                found[f"meshes/{name}_{source}_to_{target}"] = pair
    return found


def between(names: Sequence[str], rates: Sequence[str]) -> dict[str, Pair]:
    """Between two hosts: what is known is the base at the first rate."""
    found: dict[str, Pair] = {}
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        starts = {name: partial(HostsJob, name, "ours", _setting(TRIED[name]), hosts=hosts) for name in names}
        turns = Turns(stack.enter_context(warmed_up(starts, WARM_UP)))
        evidence: Evidence | None = None
        for label in rates:
            rate, gbit, seconds, rounds = RATES[label]
            hosts.throttle(rate)
            turns.go(rounds, seconds)
            if evidence is None:
                evidence = turns.evidence()
                _told(evidence)
            for name in names:
                if name == BASE and label == rates[0]:
                    continue
                change = replace(TRIED[name].change, bandwidth_gbit=gbit)
                found[f"{label}/{name}"] = paired(evidence, change, turns.medians[name])
    return found


def _told(evidence: Evidence) -> None:
    print(f"base {evidence.step_s * 1e3:.1f} ms; link {evidence.fitted.source}", flush=True)


def errors(figures: Sequence[Figure], name: str) -> list[Figure]:
    """The worst and the middle of these errors."""
    found = [abs(f.value) for f in figures]
    if not found:
        return []
    worst = Figure(f"whatif/{name}worst_error_percent", max(found), min(found), max(found), "%")
    return [worst, Figure(f"whatif/{name}median_error_percent", statistics.median(found), min(found), max(found), "%")]


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All pairs (or those of one question), the worst and the middle one; engines and meshes by themselves."""
    names = QUICK if arguments.quick else tuple(TRIED)
    rates = ("unthrottled", "1gbit") if arguments.quick else tuple(RATES)
    questions: Mapping[str, Callable[[], dict[str, Pair]]] = {
        "one_host": lambda: here(names, 3),
        "ranks": lambda: more_ranks(3),
        "engines": lambda: engines(3),
        "meshes": lambda: meshes(3),
        "two_hosts": lambda: between(names, rates),
    }
    found: dict[str, list[Pair]] = {}
    for _ in range(1 if arguments.quick else STARTS):
        for question, ask in questions.items():
            if arguments.only not in (None, question):
                continue
            try:
                pairs = ask()
            except UnavailableError as reason:
                print(f"two hosts are left out: {reason}", file=sys.stderr)
                continue
            for label, pair in pairs.items():
                found.setdefault(label, []).append(pair)
    figures = [compared(label, pairs) for label, pairs in found.items()]
    apart = {name: [f for f in figures if f.name.startswith(f"whatif/{name}/")] for name in ("engines", "meshes")}
    others = [f for f in figures if not any(f in each for each in apart.values())]
    return [*figures, *errors(others, ""), *(e for name, each in apart.items() for e in errors(each, f"{name}_"))]


if __name__ == "__main__":
    parser = options(__doc__)
    asked = ("one_host", "ranks", "engines", "meshes", "two_hosts")
    parser.add_argument("--only", choices=asked, help="ask only this question")
    given = parser.parse_args()
    report(measure(given), given.json)
