"""Do predictions of `hvdtrain timeline whatif`, and their intervals, hold for jobs that nobody tuned them to?

A situation is drawn by a seed: four jobs of one model, namely one, the same again, and two that differ from it in an
option or two. They take turns of seconds (see jobs.py). The records of each predict the others but its equal. Kinds of
situations, in turn:

- exchange: other compressions, buckets, global batches, of 2 ranks on one host;
- engines: other engines and divided optimizers;
- ranks: 1, 2 and 4 ranks on the cores of this machine;
- apart: workers that exchange rarely, from those that exchange in every step;
- meshes: ranks that divide matrices, sequences, experts or layers, with another batch, buckets or compression;
- hosts: two hosts of one core each (see tests/support/two_hosts.py; needs root), and another bandwidth.

An error is 100 (predicted / measured - 1) of a median step, or of the mean over rounds. Two equal jobs differ, too: by
how much is the figure `whatif/equal_jobs_percent`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path

from common import Figure, busy, options, report
from host_jobs import HostsJob
from jobs import SGD, Job, Setting, take_turns, warmed_up

from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.timeline.whatif.evidence import Change, Evidence
from hvdtrain.timeline.whatif.outer_exchange import predict_rarely
from hvdtrain.timeline.whatif.predict import predict
from hvdtrain.timeline.whatif.read_run import read_evidence
from tests.support.two_hosts import UnavailableError, two_hosts

WARM_UP = 9
"""Steps: after them a job has written what is read."""
ROUNDS, TURN_S, LEAST = 3, 2.5, 4
"""Turns of each job, their seconds, and their steps at least."""
KINDS = ("exchange", "engines", "ranks", "apart", "meshes", "hosts")
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "powersgd:4", "topk")
BUCKETS = (1.0, 2.0, 4.0, 8.0, 32.0)
DIVIDED = (("horovod", "none"), ("horovod", "optimizer"), ("horovod", "gradients"), ("ddp", "none"), ("fsdp", "none"))
AGAIN = "again"
SITUATIONS = 24


@dataclass(frozen=True)
class Asked:
    """Of a job, what a question may change."""

    ranks: int = 2
    passes: int = 1
    compression: str = "none"
    bucket_mib: float | None = None
    engine: str = "horovod"
    shard: str = "none"
    sync: str | None = None

    @property
    def period(self) -> int:
        """Steps of a round of workers that train apart, else 1."""
        return 1 if self.sync is None else int(self.sync.partition(":")[2])


@dataclass(frozen=True)
class Situation:
    """Four jobs of one setting, by name. `rates`: Gbit/s between two hosts, None without a limit."""

    kind: str
    setting: Setting
    jobs: Mapping[str, Asked]
    rates: Sequence[float | None] = (None,)

    def of(self, name: str) -> Setting:
        """The setting of a job."""
        job = self.jobs[name]
        given = {f"parallel.{key}": getattr(job, key) for key in ("compression", "bucket_mib", "engine", "shard")}
        if job.sync is not None:
            given |= {"parallel.sync": job.sync, "parallel.workers": 2}
        ours = {**self.setting.ours, **{key: value for key, value in given.items() if value is not None}}
        return replace(self.setting, ranks=job.ranks, passes=job.passes, ours=ours)

    def change(self, source: str, target: str, gbit: float | None) -> Change:
        """What a user would ask who has a job, and thinks of another."""
        was, asked = self.jobs[source], self.jobs[target]
        same = was.ranks * was.passes == asked.ranks * asked.passes
        return Change(
            size=None if was.ranks == asked.ranks else asked.ranks,
            ranks_per_host=None if was.ranks == asked.ranks else asked.ranks,
            global_batch=None if same else asked.ranks * asked.passes * self.setting.micro_batch,
            compression=None if was.compression == asked.compression else asked.compression,
            bucket_mib=None if was.bucket_mib == asked.bucket_mib else asked.bucket_mib,
            engine=None if was.engine == asked.engine else asked.engine,
            shard=None if (was.engine, was.shard) == (asked.engine, asked.shard) else asked.shard,
            sync=asked.sync,
            workers=None if asked.sync is None else 2,
            bandwidth_gbit=gbit,
        )


def draw(seed: int, number: int) -> Situation:
    """The situation of this number."""
    chance = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    models = ("default",) if kind == "meshes" else ("default", "llama15m")
    model = chance.choice(models)
    optimizer, clip = chance.choice([(SGD, 0.0), (asdict(OptimizerConfig()), 1.0)])
    ours: dict[str, object] = {"observe.stall_timeout_s": 0}
    if kind == "meshes":
        ours[f"parallel.{chance.choice(('tp', 'cp', 'pp', 'ep'))}"] = 2
    arguments = {"data.seq_len" if model == "default" else "seq_len": chance.choice((16, 32, 64))}
    setting = Setting(model, chance.choice((1, 2)), arguments=arguments, optimizer=optimizer, clip=clip, ours=ours)
    rates = tuple(chance.sample((None, 2.0, 1.0, 0.5, 0.25), 2)) if kind == "hosts" else (None,)
    first = _first(kind, chance, pipeline="parallel.pp" in ours)
    jobs = {"first": first, AGAIN: first}
    while len(jobs) < 4:
        other = _other(kind, first, chance, pipeline="parallel.pp" in ours)
        if other not in jobs.values():
            jobs[f"other_{len(jobs) - 1}"] = other
    return Situation(kind, setting, jobs, rates)


def _first(kind: str, chance: random.Random, pipeline: bool) -> Asked:
    passes = chance.choice((2, 4) if pipeline else (1, 2, 4))
    if kind == "engines":
        engine, shard = chance.choice(DIVIDED[:4])
        return Asked(passes=passes, engine=engine, shard=shard)
    if kind == "ranks":
        return Asked(ranks=chance.choice((1, 2)), passes=passes, compression=chance.choice(("none", "fp16")))
    if kind in ("apart", "meshes"):
        return Asked(passes=passes)
    return Asked(passes=passes, compression=chance.choice(COMPRESSIONS), bucket_mib=chance.choice(BUCKETS))


def _other(kind: str, first: Asked, chance: random.Random, pipeline: bool) -> Asked:
    """The job with one or two things changed."""
    passes = chance.choice((2, 4, 8) if pipeline else (1, 2, 4))
    if kind == "engines":
        engine, shard = chance.choice(DIVIDED)
        return replace(first, engine=engine, shard=shard, passes=chance.choice((first.passes, passes)))
    if kind == "ranks":
        return replace(first, ranks=chance.choice((1, 2, 4)), compression=chance.choice(("none", "fp16", "int8")))
    if kind == "apart":
        return replace(first, sync=f"diloco:{chance.choice((4, 6, 8))}")
    changes: list[Mapping[str, object]] = [
        {"passes": passes},
        {"bucket_mib": chance.choice(BUCKETS)},
        {"compression": chance.choice(COMPRESSIONS if kind != "meshes" else ("none", "fp16", "bf16"))},
    ]
    found = first
    for one in chance.sample(changes, chance.choice((1, 2))):
        found = replace(found, **one)  # type: ignore[arg-type] - of the fields' own types
    return found


def record(situation: Situation, folder: Path) -> None:
    """Run the jobs of a situation in turns; leave their runs, and what was seen of them, in a folder."""
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts()) if situation.kind == "hosts" else None

        def start(name: str, own: Path) -> Job:
            if hosts is None:
                return Job("ours", situation.of(name), own)
            return HostsJob(name, "ours", situation.of(name), own, hosts)

        def limit(gbit: float | None) -> None:
            if hosts is not None:
                hosts.throttle(None if gbit is None else f"{gbit:g}gbit")

        limit(situation.rates[0])  # jobs measure their link when they start
        jobs = stack.enter_context(warmed_up({name: partial(start, name) for name in situation.jobs}, WARM_UP))
        seen: list[dict[str, list[list[float]]]] = []
        for rate in situation.rates:
            limit(rate)
            turn = lambda job: _turn(job, situation.jobs[job.folder.name].period)  # noqa: E731
            seen.append(take_turns(jobs, turn, ROUNDS))
        folder.mkdir(parents=True)
        for name, job in jobs.items():
            shutil.copytree(job.folder, folder / name)
    (folder / "seen.json").write_text(json.dumps(seen))


def _turn(job: Job, period: int) -> list[float]:
    """The times of the steps of a turn: whole rounds, where workers train apart."""
    steps, seconds = list[dict[str, float]](), TURN_S
    while len(steps) < max(LEAST, 2 * period):  # they follow each other
        steps = job.turn(seconds)
        seconds *= 2
    return [step["time"] for step in steps[len(steps) % period :]]


@dataclass(frozen=True)
class Guess:
    """A prediction beside what was measured; seconds."""

    label: str
    kind: str
    step_s: float
    low_s: float
    high_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """In percent."""
        return 100 * (self.step_s / self.measured_s - 1)

    @property
    def covered(self) -> bool:
        """Whether the measured step lies in the interval."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def half_width(self) -> float:
        """In percent of the predicted step."""
        return 50 * (self.high_s - self.low_s) / self.step_s


def guesses(situation: Situation, number: int, folder: Path) -> Iterator[Guess]:
    """Predict each job of a recorded situation from each other; what cannot be predicted is left out."""
    seen = json.loads((folder / "seen.json").read_text())
    for at, rate in enumerate(situation.rates):
        gbit = rate if at else None
        for source, target in permutations(situation.jobs, 2):
            same = situation.jobs[source] == situation.jobs[target]
            if (same and not at) or (at and gbit is None):  # nothing is asked; no number can be given
                continue
            try:
                found = _predicted(_evidence(folder / source, seen[0][source]), situation.change(source, target, gbit))
            except (ConfigError, DataError):
                continue
            label = f"{number}/{source}_to_{target}{f'_{rate:g}' if gbit else ''}"
            yield Guess(label, situation.kind, *found, _measured(folder / target, seen[at][target], situation, target))


def equal_spread(situation: Situation, folder: Path) -> float:
    """How much longer a step of the equal job takes, in percent."""
    seen = json.loads((folder / "seen.json").read_text())[0]
    first, again = (_measured(folder / name, seen[name], situation, name) for name in ("first", AGAIN))
    return 100 * (again / first - 1)


def _evidence(folder: Path, turns: Sequence[Sequence[float]]) -> Evidence:
    times = {time for turn in turns for time in turn}
    return read_evidence(folder, lambda step: step["time"] in times)


def _predicted(evidence: Evidence, change: Change) -> tuple[float, float, float]:
    if change.sync is not None:
        rare = predict_rarely(evidence, change)
        return rare.step_s, rare.low_s, rare.high_s
    found = predict(evidence, change)
    return found.then.step_s, found.low_s, found.high_s


def _measured(folder: Path, turns: Sequence[Sequence[float]], situation: Situation, name: str) -> float:
    """Seconds of a step: the median, or the mean over rounds; the middle one of the turns."""
    steps = {step["time"]: step["step_s"] for step in read_steps(folder / "journal.jsonl").values()}
    middle = statistics.median if situation.jobs[name].period == 1 else statistics.fmean
    return statistics.median(middle([steps[time] for time in turn]) for turn in turns)


def errors(name: str, found: Sequence[Guess]) -> list[float]:
    """Print a line of a kind of situations, and return the errors in percent."""
    signed = [guess.error for guess in found]
    print(
        f"{name:<9} {len(found):3} predictions: median error {statistics.median(map(abs, signed)):4.1f}%,"
        f" worst {max(map(abs, signed)):5.1f}%, mean {statistics.fmean(signed):+5.1f}%,"
        f" within the interval {sum(guess.covered for guess in found):3},"
        f" half the interval {statistics.median(guess.half_width for guess in found):4.1f}%",
        flush=True,
    )
    return signed


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Record the situations that are not kept yet, and predict."""
    found, spreads = list[Guess](), list[float]()
    with tempfile.TemporaryDirectory() as scratch, busy(arguments.busy):
        kept = arguments.kept or Path(scratch)
        for number in range(len(KINDS) // 2 if arguments.quick else arguments.situations):
            situation, folder = draw(arguments.seed, number), kept / str(number)
            if not (folder / "seen.json").exists():
                try:
                    record(situation, folder)
                except UnavailableError as reason:
                    print(f"two hosts are left out: {reason}", flush=True)
                    continue
            spreads.append(abs(equal_spread(situation, folder)))
            for guess in guesses(situation, number, folder):
                print(
                    f"{guess.kind:<9} {guess.label:<26} predicted {guess.step_s * 1e3:7.1f} ms"
                    f" [{guess.low_s * 1e3:.0f} .. {guess.high_s * 1e3:.0f}], measured {guess.measured_s * 1e3:7.1f} ms"
                    f" {guess.error:+6.1f}%{'' if guess.covered else '  outside'}",
                    flush=True,
                )
                found.append(guess)
    for kind in KINDS:
        if of_kind := [guess for guess in found if guess.kind == kind]:
            errors(kind, of_kind)
    signed = errors("all", found)
    apart = sorted(map(abs, signed))
    mean, share = statistics.fmean(signed), 100 * statistics.fmean(guess.covered for guess in found)
    half = statistics.median(guess.half_width for guess in found)
    return [
        Figure("whatif/median_error_percent", statistics.median(apart), apart[0], apart[-1], "%"),
        Figure("whatif/worst_error_percent", apart[-1], apart[0], apart[-1], "%"),
        Figure("whatif/bias_percent", mean, min(signed), max(signed), "%"),
        Figure("whatif/coverage_percent", share, share, share, "%"),
        Figure("whatif/half_width_percent", half, half, half, "%"),
        Figure("whatif/equal_jobs_percent", statistics.median(spreads), min(spreads), max(spreads), "%"),
    ]


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--situations", type=int, default=SITUATIONS, help=f"to draw (default: {SITUATIONS})")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside (default: 0)")
    parser.add_argument(
        "--kept", type=Path, metavar="FOLDER", help="keep recordings there, and use those that are there"
    )
    given = parser.parse_args()
    report(measure(given), given.json)
