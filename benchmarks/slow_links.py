"""What do rare exchanges cost and lose over 100 and 10 Mbit/s, beside DDP's hooks and our int8 in every step?

Steps: two hosts of one core each (see tests/support/two_hosts.py; needs root), one rank of 1 thread on each, a Llama of
15 million parameters, 4 x 128 tokens a rank; two workers, of one rank each. All jobs are started once and take turns
(see jobs.py) of rounds of `ROUND` steps, so that each outer step counts. `slow_links/100mbit/step/NAME` is the mean
step over that of ranks without exchange in the same round, `step` the lowest of ours that exchanges rarely.
`bytes_per_sample` is what leaves a host in a round over what all-reduces of all gradients in fp32 send: 2 (n - 1) / n
of them in each step.

Losses: the default language model for `STEPS` steps with each method, one process for each core of this machine: the
curve depends on neither ranks nor links. `loss_at_equal_samples/NAME` is the held-out loss after all steps over that of
a synchronous run of the same seed. `samples_to_loss/NAME` are the steps to the held-out loss that the synchronous run
has after `TARGET` of them, over these. `100mbit/time_to_loss/NAME` is the time of these steps at 100 Mbit/s, over that
of the synchronous run with int8, which the first `START` steps of all use.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from common import Figure, figure, options, pyplot, ratios, report
from host_jobs import HostsJob
from jobs import SGD, Job, Setting, environment, take_turns, warmed_up
from models import MODELS
from peer_packages import is_installed
from time_to_loss import Run

from hvdtrain.observe.past_journal import is_finished
from tests.support.journals import read_journal
from tests.support.two_hosts import UnavailableError, two_hosts

ROUND, WINDOW = 32, 16
"""Steps in which each method exchanges all parameters, and the most between two agreements of all ranks."""
OUTER = {"outer.lr": 0.8, "outer.momentum": 0.5}
RARE: dict[str, dict[str, object]] = {
    "diloco": {"parallel.sync": "diloco:8", "outer.compression": "int2", **OUTER},
    "streaming": {"parallel.sync": "streaming:8", "outer.compression": "int2", **OUTER},
    "local": {"parallel.sync": "local:8", "outer.compression": "int4"},
    "sparseloco": {"parallel.sync": "sparseloco:8"},
    "streaming_32": {"parallel.sync": "streaming:32", "outer.compression": "int2", **OUTER},
    "streaming_32_int4": {"parallel.sync": "streaming:32", "outer.compression": "int4", **OUTER},
}
"""Options of ours that exchange rarely. Chosen with seed 7 and 400 steps."""
EVERY_STEP: dict[str, dict[str, object]] = {"int8": {"parallel.compression": "int8"}}
PEERS = ("ddp_fp16", "ddp_powersgd", "torchft_diloco")
COMPUTE = "no_exchange"
EACH_STEP = (COMPUTE, *EVERY_STEP, "ddp_fp16", "ddp_powersgd")
"""Contenders whose steps are alike, so that a few suffice."""
RATES = {"100mbit": 3, "10mbit": 2}
"""Rounds at each rate."""
TOO_SLOW = {"10mbit": (*EVERY_STEP, "ddp_fp16", "ddp_powersgd", "torchft_diloco")}
"""Contenders that take minutes a step."""
STEPS, TARGET, EVALUATED, SEEDS = 1000, 400, 40, (0, 1, 2)
START = STEPS // 10
"""Synchronous steps at the beginning."""
SYNCHRONOUS = "synchronous"


def setting(options: Mapping[str, object]) -> Setting:
    rare = {"parallel.workers": 2} if "parallel.sync" in options else {}
    further = {**options, **rare, "observe.stall_timeout_s": 0}
    return Setting("llama15m", 4, optimizer=SGD, clip=0.0, ours=further)


def mean_step_s(job: Job, steps: int, window: int) -> float:
    """The mean of `steps` steps, after those of the `window` in which the job was stopped before."""
    first = len(job.steps()) + window
    job.until(lambda seen: len(seen) >= first + steps)
    return statistics.mean(step["step_s"] for step in job.steps()[first : first + steps])


def steps(methods: Sequence[str], quick: bool) -> list[Figure]:
    """Measure steps and bytes."""
    ours = {**{name: RARE[name] for name in methods}, **EVERY_STEP}
    names = [COMPUTE, *ours, *(peer for peer in PEERS if is_installed(peer))]
    found: list[Figure] = []
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        kinds = {name: ("ours", setting(ours[name])) if name in ours else (name, setting({})) for name in names}
        starts = {name: partial(HostsJob, name, *kinds[name], hosts=hosts) for name in names}
        jobs = stack.enter_context(warmed_up(starts, ROUND))
        gradients = sum(4 * parameter.numel() for parameter in MODELS["llama15m"]().model.parameters())
        for name in (*methods, "int8"):
            share = jobs[name].bytes_a_step(ROUND) / gradients  # an all-reduce of two ranks sends all once
            found.append(figure(f"slow_links/bytes_per_sample/{name}", [share], "ratio"))
        for rate, rounds in RATES.items():
            hosts.throttle(rate)
            these = {name: job for name, job in jobs.items() if name not in TOO_SLOW.get(rate, ())}

            def turn(job: Job) -> float:
                return mean_step_s(job, 8, 1) if job.name in EACH_STEP else mean_step_s(job, ROUND, WINDOW)

            seconds = take_turns(these, turn, 1 if quick else rounds)
            over = {name: ratios(own, seconds[COMPUTE]) for name, own in seconds.items() if name != COMPUTE}
            found += [figure(f"slow_links/{rate}/step/{name}", own, "ratio") for name, own in over.items()]
            best = min(methods, key=lambda name: statistics.median(over[name]))
            found.append(figure(f"slow_links/{rate}/step", over[best], "ratio"))
    return found


def train(name: str, seed: int, folder: Path) -> Run:
    """One curve, from start to end."""
    journal = folder / f"{seed}-{name}" / "journal.jsonl"
    if not (journal.exists() and is_finished(journal)):
        options = {**RARE, SYNCHRONOUS: {}}[name]
        more = {"parallel.workers": 2, "outer.start_steps": START} if options else {}
        flags = [f"--{option}={value}" for option, value in {**options, **more}.items()]
        argv = [sys.executable, "-m", "hvdtrain", "train", f"--run_dir={journal.parent}", f"--seed={seed}", *flags]
        argv += [f"--train.steps={STEPS}", f"--train.eval_every={EVALUATED}", "--checkpoint.every=0"]
        argv += [
            "--train.router_bias=0",
            "--train.eval_samples=256",
            "--observe.tensorboard=false",
            "--observe.timeline=off",
        ]
        shutil.rmtree(journal.parent, ignore_errors=True)
        subprocess.run(argv, env=environment(), check=True, capture_output=True)
    records = read_journal(journal)
    losses = {record["at_step"]: record["loss"] for record in records if record.get("event") == "evaluation"}
    print(f"seed {seed}, {name}: held-out loss {losses[STEPS]:.4f}", flush=True)
    return Run([record["step_s"] for record in records if "step_s" in record], losses)


def curves(methods: Sequence[str], seeds: Sequence[int], folder: Path) -> dict[str, list[Run]]:
    """The runs of each method, by seed, and those of the synchronous one."""
    names = [(name, seed) for seed in seeds for name in (SYNCHRONOUS, *methods)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = dict(zip(names, pool.map(lambda each: train(*each, folder), names), strict=True))
    return {name: [runs[name, seed] for seed in seeds] for name in (SYNCHRONOUS, *methods)}


def losses(runs: Mapping[str, Sequence[Run]], at_100: Mapping[str, float]) -> list[Figure]:
    found = []
    for name in runs.keys() - {SYNCHRONOUS}:
        pairs = list(zip(runs[name], runs[SYNCHRONOUS], strict=True))
        over = [own.losses[STEPS] / other.losses[STEPS] for own, other in pairs]
        samples = [own.steps_to(other.losses[TARGET]) / TARGET for own, other in pairs]
        found.append(figure(f"slow_links/loss_at_equal_samples/{name}", over, "ratio"))
        found.append(figure(f"slow_links/samples_to_loss/{name}", samples, "ratio"))
        if name in at_100:
            whole = TARGET * at_100["int8"]
            times = [_time(each * TARGET, name, at_100) / whole for each in samples]
            found.append(figure(f"slow_links/100mbit/time_to_loss/{name}", times, "ratio"))
    return sorted(found, key=lambda each: each.name)


def _time(steps: float, name: str, at_100: Mapping[str, float]) -> float:
    """In steps without exchange."""
    return min(steps, START) * at_100["int8"] + max(0.0, steps - START) * at_100[name]


def draw(runs: Mapping[str, Sequence[Run]], at_100: Mapping[str, float], file: Path) -> None:
    """The mean held-out loss over time at 100 Mbit/s; in each method's first steps, gradients are exchanged by int8."""
    plot, axes = pyplot("slow links").subplots(figsize=(8, 3.6), layout="constrained")
    for name, color in (("int8", "#a0a0a0"), ("local", "#57ab5a"), ("streaming", "#c69026"), ("diloco", "#2f81f7")):
        own = runs.get(SYNCHRONOUS if name == "int8" else name)
        if own is None or name not in at_100:
            continue
        steps = sorted(set.intersection(*(set(run.losses) for run in own)) - {0})
        times = [_time(step, name, at_100) for step in steps]
        label = "exchange in each step, int8" if name == "int8" else str(RARE[name]["parallel.sync"])
        axes.plot(times, [statistics.mean(run.losses[s] for run in own) for s in steps], color=color, label=label)
    axes.set_xlabel("time at 100 Mbit/s, in steps without exchange")
    axes.set_ylabel("held-out loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    plot.savefig(file, transparent=True, metadata={"Date": None})


def main() -> None:
    """Measure steps where this machine can be made into two hosts, and losses."""
    parser = options(__doc__)
    parser.add_argument("--only", choices=("steps", "losses"))
    parser.add_argument("--steps", type=Path, metavar="FILE", help="take the figures of steps from these results")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep finished runs, and use those that are there")
    parser.add_argument("--methods", nargs="+", choices=RARE, default=[*RARE])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write losses over time there, as SVG")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    if arguments.steps is not None:
        figures = [Figure(**each) for each in json.loads(arguments.steps.read_text())["results"]]
    elif arguments.only != "losses":
        try:
            figures = steps(arguments.methods, arguments.quick)
        except UnavailableError as reason:
            print(f"steps are left out: {reason}", file=sys.stderr)
    if arguments.only != "steps" and not arguments.quick:
        prefix = "slow_links/100mbit/step/"
        at_100 = {f.name.removeprefix(prefix): f.value for f in figures if f.name.startswith(prefix)}
        with tempfile.TemporaryDirectory() as scratch:
            runs = curves(arguments.methods, arguments.seeds, arguments.runs or Path(scratch))
        figures += losses(runs, at_100)
        if arguments.picture:
            draw(runs, at_100, arguments.picture)
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
