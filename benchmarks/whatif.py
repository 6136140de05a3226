"""How far off are the predictions of `hvdtrain timeline whatif`, on configurations that nothing was fitted to?

A Llama of 15 million parameters, 4 x 128 tokens a micro-batch, SGD, ranks of 1 thread. Of one job, the base, is known
what any run leaves; others differ from it by what is asked. All are started once and take turns of seconds (see
jobs.py). A figure is 100 (predicted / measured - 1) of a median step, from which is taken what a job's forward passes
took longer than the base's, times backward's share: other work on the machine. Low and high are of the rounds.

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

from common import Figure, figure, main
from host_jobs import HostsJob, UnavailableError, two_hosts
from jobs import Job, Setting

from hvdtrain.timeline.whatif.change import Change
from hvdtrain.timeline.whatif.evidence import Evidence
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read import read_evidence

SGD = {"name": "sgd", "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0}
PLAIN = Setting("llama15m", 4, optimizer=SGD, clip=0.0, ours={"observe.stall_timeout_s": 0})
BASE = "base"
WARM_UP = 9
"""Steps: after them the base has written what is read."""
LEAST = 3
"""Steps of a turn."""
RATES: Mapping[str, tuple[str | None, float | None, float, int]] = {
    "unthrottled": (None, None, 3.0, 3),
    "1gbit": ("1gbit", 1.0, 4.0, 2),
    "300mbit": ("300mbit", 0.3, 6.0, 2),
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


def level(evidence: Evidence, medians: Sequence[tuple[float, float]]) -> list[float]:
    """Steps without what computing was slower or faster by than in the base's turns, as forward tells by itself."""
    forward_s, backward_s = evidence.parts_s["forward"], evidence.parts_s["backward"]
    return [step_s - (seen_s / forward_s - 1) * (forward_s + backward_s) for step_s, seen_s in medians]


def compared(label: str, evidence: Evidence, change: Change, measured_s: Sequence[float]) -> Figure:
    """One pair."""
    found = predict(evidence, change)
    middle = statistics.median(measured_s)
    inside = found.low_s <= middle <= found.high_s
    print(
        f"{label:<26} predicted {found.then.step_s * 1e3:7.1f} ms [{found.low_s * 1e3:.0f} .. {found.high_s * 1e3:.0f}]"
        f"  measured {middle * 1e3:7.1f} ms [{min(measured_s) * 1e3:.0f} .. {max(measured_s) * 1e3:.0f}]"
        f"  {100 * (found.then.step_s / middle - 1):+5.1f} %{'' if inside else '  outside'}",
        flush=True,
    )
    errors = [100 * (found.then.step_s / seconds - 1) for seconds in measured_s]
    return replace(figure(f"whatif/{label}", errors, "%"), value=100 * (found.then.step_s / middle - 1))


def here(names: Sequence[str], rounds: int) -> list[Figure]:
    """On one host."""
    with one_host_turns({name: _setting(TRIED[name]) for name in names}) as turns:
        turns.go(names, rounds, 3.0)
        evidence = turns.evidence()
        _told(evidence)
        return [
            compared(f"one_host/{name}", evidence, TRIED[name].change, level(evidence, turns.medians[name]))
            for name in names
            if name != BASE
        ]


def more_ranks(rounds: int) -> list[Figure]:
    """From 1 rank to 2, of the same global batch."""
    alone = replace(PLAIN, ranks=1, passes=2)
    with one_host_turns({BASE: alone, "two": PLAIN}) as turns:
        turns.go((BASE, "two"), rounds, 5.0)
        evidence = turns.evidence()
        _told(evidence)
        return [compared("ranks/1_to_2", evidence, Change(size=2), [step_s for step_s, _ in turns.medians["two"]])]


def between(names: Sequence[str], rates: Sequence[str]) -> list[Figure]:
    """Between two hosts: what is known is the base at the first rate."""
    figures = []
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
                measured_s = level(evidence, turns.medians[name])
                figures.append(compared(f"{label}/{name}", evidence, change, measured_s))
    return figures


def _told(evidence: Evidence) -> None:
    print(f"base {evidence.step_s * 1e3:.1f} ms; link {evidence.fitted.source}", flush=True)


def measure(quick: bool) -> list[Figure]:
    """All pairs, the worst and the middle one."""
    names = QUICK if quick else tuple(TRIED)
    rounds = 2 if quick else 3
    figures = [*here(names, rounds), *more_ranks(rounds)]
    try:
        figures += between(names, ("unthrottled", "1gbit") if quick else tuple(RATES))
    except UnavailableError as reason:
        print(f"two hosts are left out: {reason}", file=sys.stderr)
    errors = [abs(f.value) for f in figures]
    worst = Figure("whatif/worst_error_percent", max(errors), min(errors), max(errors), "%")
    middle = Figure("whatif/median_error_percent", statistics.median(errors), min(errors), max(errors), "%")
    return [*figures, worst, middle]


if __name__ == "__main__":
    main(__doc__, measure)
