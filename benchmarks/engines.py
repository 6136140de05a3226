"""How long is a step of each of our engines, beside the engines of the peers?

2 ranks of 1 thread, a Llama of 15 million parameters, 4 x 128 tokens a rank, AdamW, clipping. All jobs take turns of
seconds (see jobs.py). The step of a contender is the median time from the end of a step to the end of the next within
a turn: all that a loop does between two steps counts. A figure `A_over_B` is the median over rounds of the ratio of the
steps of one round; below 1, A is faster. Peers whose packages are not installed are left out (peer_packages.py).

With --two_hosts the same between two hosts of one core each over 1 Gbit/s (tests/support/two_hosts.py; needs root),
for those in `BETWEEN_HOSTS`; the figures are then `engines/1gbit/...`.

--only NAME,NAME measures these contenders alone. The mean loss of each contender over the same steps is printed; one
whose loss does not fall ends the benchmark.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common import Figure, figure, options, ratios, report
from host_jobs import HostsJob
from jobs import BY_TORCH, Job, Setting, take_turns, warmed_up
from peer_packages import is_installed, use_packages

from hvdtrain.config.parse import parse_object
from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.errors import ConfigError
from tests.support.two_hosts import UnavailableError, two_hosts

OURS: Mapping[str, Mapping[str, object]] = {
    "replicated": {},
    "zero1": {"parallel.shard": "optimizer"},
    "zero2": {"parallel.shard": "gradients"},
    "zero2_bf16": {"parallel.shard": "gradients", "parallel.compression": "bf16"},
    "zero2_int8": {"parallel.shard": "gradients", "parallel.compression": "int8"},
    "ours_on_ddp": {"parallel.engine": "ddp"},
    "fsdp": {"parallel.engine": "fsdp"},
    "fsdp_gloo": {"parallel.engine": "fsdp"},
    "fsdp_int8": {"parallel.engine": "fsdp", "parallel.compression": "int8"},
}
"""Our options by contender; one whose options this version refuses is left out."""

STARTED_BY_TORCH = ("fsdp_gloo",)
"""Those of ours whose ranks are started as torchrun does, and so use Gloo."""

PEERS = (
    "no_exchange", "ddp", "ddp_zero", "accelerate", "lightning", "deepspeed_zero1", "deepspeed_zero2", "fsdp2",
)  # fmt: skip
"""Of engine_loops.py."""

PAIRS: Mapping[str, tuple[str, str]] = {
    "zero1_over_replicated": ("zero1", "replicated"),
    "zero2_over_replicated": ("zero2", "replicated"),
    "zero1_over_deepspeed_zero1": ("zero1", "deepspeed_zero1"),
    "zero2_over_deepspeed": ("zero2", "deepspeed_zero2"),
    "zero2_over_ddp_zero": ("zero2", "ddp_zero"),
    "zero2_over_fsdp2": ("zero2", "fsdp2"),
    "zero2_bf16_over_zero2": ("zero2_bf16", "zero2"),
    "zero2_int8_over_zero2": ("zero2_int8", "zero2"),
    "ddp_over_bare": ("ours_on_ddp", "ddp"),
    "fsdp_comm_over_gloo": ("fsdp", "fsdp_gloo"),
    "fsdp_int8_over_gloo": ("fsdp_int8", "fsdp_gloo"),
    "fsdp_over_fsdp2": ("fsdp", "fsdp2"),
    "replicated_over_ddp": ("replicated", "ddp"),
    "replicated_over_accelerate": ("replicated", "accelerate"),
    "replicated_over_lightning": ("replicated", "lightning"),
    "replicated_over_deepspeed": ("replicated", "deepspeed_zero2"),
}
"""Of each ratio, what is divided by what."""

BETWEEN_HOSTS = (
    "replicated", "zero1", "zero2", "zero2_bf16", "zero2_int8", "fsdp", "fsdp_gloo", "fsdp_int8",
    "no_exchange", "ddp", "ddp_zero", "deepspeed_zero2",
)  # fmt: skip
QUICK = ("replicated", "zero2", "ours_on_ddp", "no_exchange", "ddp")
RATE = "1gbit"
WARM_UP, TURN_S = 6, 6.0
CONSTANT = {**asdict(OptimizerConfig()), "schedule": "constant", "warmup_steps": 0}  # as in the loops of the peers


def nested(flat: Mapping[str, object]) -> dict[str, Any]:
    """Return options by section: parallel.shard as {"parallel": {"shard": ...}}."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, option = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[option] = value
    return found


def is_accepted(name: str) -> bool:
    """Return whether our options of a contender exist in this version; say so if they do not."""
    try:
        parse_object(nested(OURS[name]), None)
    except ConfigError as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}", file=sys.stderr)
        return False
    return True


def contenders(wanted: Iterable[str]) -> list[str]:
    """Return those that can be measured here."""
    return [name for name in wanted if (is_accepted(name) if name in OURS else is_installed(name))]


def kind(name: str) -> tuple[str, Setting]:
    """Return what `jobs.Job` calls a contender, and what it trains."""
    ours = {"observe.stall_timeout_s": 0, **OURS.get(name, {})}
    found = f"engine_loops:{name}" if name not in OURS else BY_TORCH if name in STARTED_BY_TORCH else "ours"
    return found, Setting("llama15m", 4, optimizer=CONSTANT, ours=ours)


def step_s(job: Job, turn_s: float = TURN_S) -> float:
    """Return the median time between the ends of two steps in a row, in one turn; of slow steps, in a longer one."""
    found: list[float] = []
    while len(found) < 2:
        ends = [step["time"] for step in job.turn(turn_s)]
        turn_s *= 2
        found = [after - before for before, after in itertools.pairwise(ends)]
    return statistics.median(found)


def losses(jobs: Mapping[str, Job]) -> dict[str, float]:
    """Return the mean loss of each over the last of the steps that all have done; print them.

    Errors: SystemExit if one has not fallen.
    """
    steps = {name: [step["loss"] for step in job.steps()] for name, job in jobs.items()}
    last = min(map(len, steps.values()))
    first = max(1, last - 10)
    found = {name: statistics.fmean(own[first:last]) for name, own in steps.items()}
    print(f"mean loss of steps {first + 1} to {last}:", ", ".join(f"{n} {v:.3f}" for n, v in found.items()), flush=True)
    if risen := [name for name, own in steps.items() if not found[name] < own[0]]:
        raise SystemExit(f"the loss does not fall: {', '.join(risen)}")
    return found


def run(starts: Mapping[str, Callable[[Path], Job]], rounds: int, stack: ExitStack) -> dict[str, list[float]]:
    """Return the steps of each contender by round."""
    jobs = stack.enter_context(warmed_up(starts, WARM_UP))
    found = take_turns(jobs, step_s, rounds)
    losses(jobs)
    return found


def figures(seconds: Mapping[str, Sequence[float]], prefix: str) -> list[Figure]:
    """Return the ratios of `PAIRS` whose parts were measured, each over no exchange, and milliseconds."""
    others = [name for name in seconds if name != "no_exchange"]
    pairs = {**PAIRS, **{f"{name}_over_no_exchange": (name, "no_exchange") for name in others}}
    found = [
        figure(f"{prefix}/{name}", ratios(seconds[own], seconds[other]), "ratio")
        for name, (own, other) in pairs.items()
        if own in seconds and other in seconds
    ]
    return found + [figure(f"{prefix}/{name}_ms", [1e3 * s for s in own], "ms") for name, own in seconds.items()]


def here(names: Sequence[str], starts: int, rounds: int) -> list[Figure]:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(starts):
        with ExitStack() as stack:
            for name, own in run({name: partial(Job, *kind(name)) for name in names}, rounds, stack).items():
                seconds[name] += own
    return figures(seconds, "engines")


def between_hosts(names: Sequence[str], starts: int, rounds: int) -> list[Figure]:
    """The same between two hosts; nothing where this machine cannot be made into two."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for _ in range(starts):
            with ExitStack() as stack:
                hosts = stack.enter_context(two_hosts(rate=RATE))
                jobs = {name: partial(HostsJob, name, *kind(name), hosts=hosts) for name in names}
                for name, own in run(jobs, rounds, stack).items():
                    seconds[name] += own
    except UnavailableError as reason:
        print(f"two hosts are left out: {reason}", file=sys.stderr)
        return []
    return figures(seconds, f"engines/{RATE}")


def measure(arguments: argparse.Namespace) -> list[Figure]:
    everyone = BETWEEN_HOSTS if arguments.two_hosts else (*OURS, *PEERS)
    default = [name for name in everyone if name in QUICK] if arguments.quick else everyone
    names = contenders(arguments.only.split(",") if arguments.only else default)
    starts, rounds = (1, 2) if arguments.quick else (3 if arguments.two_hosts else 5, 3)
    return (between_hosts if arguments.two_hosts else here)(names, starts, rounds)


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--two_hosts", action="store_true", help="between two hosts at 1 Gbit/s instead of on one")
    parser.add_argument("--only", metavar="NAMES", help="measure only these contenders, separated by commas")
    given = parser.parse_args()
    use_packages()  # for their versions
    report(measure(given), given.json)
