"""How far off are the predictions of `hvdtrain timeline whatif`, on configurations that nothing was fitted to?

A Llama of 15 million parameters, 4 x 128 tokens a micro-batch, SGD, ranks of 1 thread. Of one job, the base, is known
what any run leaves; others differ from it by what is asked. All are started and take turns of seconds (see jobs.py);
two equal jobs differ by some percent for as long as they live, so that is done twice. A figure is 100 (predicted /
measured - 1) of the two starts' mean of a median step; low and high are of each start. How fast the machine was in a
turn is seen in forward's passes, and told to the prediction: other work there is nothing that it could know of.

- one_host: 2 ranks on 2 cores without compression, and from it other sizes of buckets, other compressions;
- ranks: 1 rank, from it 2 on one host;
- unthrottled, 1gbit, 300mbit, 100mbit: 2 hosts of one core each (see tests/support/two_hosts.py; needs root), fitted to
  the base at the first rate alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from common import Figure, main
from host_jobs import HostsJob, UnavailableError, two_hosts
from jobs import Job, Setting

from hvdtrain.timeline.whatif.change import Change
from hvdtrain.timeline.whatif.evidence import Evidence
from hvdtrain.timeline.whatif.predict import Prediction, predict
from hvdtrain.timeline.whatif.read_run import read_evidence

SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
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
QUICK = (BASE, "bucket_1", "int8", "powersgd_4")


@dataclass
class Turns:
    """What was seen of jobs that take turns.

    Attributes:
        jobs: by name.
        folders: of their runs.
    """

    jobs: Mapping[str, Job]
    folders: Mapping[str, Path]

    def __post_init__(self) -> None:
        """Nothing was seen yet."""
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.medians: dict[str, list[tuple[float, float]]] = {name: [] for name in self.jobs}
        self._seen: set[float] = set()

    def go(self, names: Sequence[str], rounds: int, seconds: float) -> None:
        """Let the jobs run in turn."""
        for first in range(rounds):
            turn = first % len(names)
            for name in (*names[turn:], *names[:turn]):
                steps: list[dict[str, float]] = []
                while len(steps) < LEAST:
                    steps += self.jobs[name].turn(seconds)
                step_s, forward_s = (statistics.median(s[key] for s in steps) for key in ("step_s", "forward_s"))
                self.medians[name].append((step_s, forward_s))
                if name == BASE:
                    self._seen |= {step["time"] for step in steps}

    def evidence(self) -> Evidence:
        """What the base has left of the steps that were seen."""
        return read_evidence(self.folders[BASE], lambda step: step["time"] in self._seen)


@contextmanager
def hosts_turns(names: Sequence[str]) -> Iterator[tuple[Turns, object]]:
    """Jobs on two hosts."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        jobs: dict[str, Job] = {}
        for name in names:
            (scratch / name).mkdir()
            jobs[name] = HostsJob(name, "ours", _setting(TRIED[name]), scratch / name, hosts)
            stack.callback(jobs[name].end)
            jobs[name].until(lambda steps: len(steps) >= WARM_UP)
        yield Turns(jobs, {name: scratch / name for name in names}), hosts


@contextmanager
def one_host_turns(settings: Mapping[str, Setting]) -> Iterator[Turns]:
    """Jobs here."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        jobs: dict[str, Job] = {}
        for name, setting in settings.items():
            (scratch / name).mkdir()
            jobs[name] = Job("ours", setting, scratch / name)
            stack.callback(jobs[name].end)
            jobs[name].until(lambda steps: len(steps) >= WARM_UP)
        yield Turns(jobs, {name: scratch / name for name in settings})


def _setting(tried: Tried) -> Setting:
    return replace(PLAIN, ours={**PLAIN.ours, **tried.ours})


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
    """Of one start of all jobs."""
    step_s, forward_s = (statistics.median(column) for column in zip(*medians, strict=True))
    return predict(at_pace(evidence, forward_s), change), step_s


def compared(label: str, pairs: Sequence[Pair]) -> Figure:
    """All starts of one configuration."""
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
    """On one host."""
    with one_host_turns({name: _setting(TRIED[name]) for name in names}) as turns:
        turns.go(names, rounds, 3.0)
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
    with one_host_turns({BASE: alone, "two": PLAIN}) as turns:
        turns.go((BASE, "two"), rounds, 5.0)
        evidence = turns.evidence()
        _told(evidence)
        return {
            "ranks/1_to_2": (predict(evidence, Change(size=2)), statistics.median(s for s, _ in turns.medians["two"]))
        }


def between(names: Sequence[str], rates: Sequence[str]) -> dict[str, Pair]:
    """Between two hosts: what is known is the base at the first rate."""
    found: dict[str, Pair] = {}
    with hosts_turns(names) as (turns, hosts):
        evidence: Evidence | None = None
        for label in rates:
            rate, gbit, seconds, rounds = RATES[label]
            hosts.throttle(rate)  # type: ignore[attr-defined]
            turns.forget()
            turns.go(names, rounds, seconds)
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


def measure(quick: bool) -> list[Figure]:
    """All pairs, the worst and the middle one."""
    names = QUICK if quick else tuple(TRIED)
    rates = ("unthrottled", "1gbit") if quick else tuple(RATES)
    found: dict[str, list[Pair]] = {}
    for _ in range(1 if quick else STARTS):
        for ask in (lambda: here(names, 3), lambda: more_ranks(3), lambda: between(names, rates)):
            try:
                pairs = ask()
            except UnavailableError as reason:
                print(f"two hosts are left out: {reason}", file=sys.stderr)
                continue
            for label, pair in pairs.items():
                found.setdefault(label, []).append(pair)
    figures = [compared(label, pairs) for label, pairs in found.items()]
    errors = [abs(f.value) for f in figures]
    worst = Figure("whatif/worst_error_percent", max(errors), min(errors), max(errors), "%")
    middle = Figure("whatif/median_error_percent", statistics.median(errors), min(errors), max(errors), "%")
    return [*figures, worst, middle]


if __name__ == "__main__":
    main(__doc__, measure)
