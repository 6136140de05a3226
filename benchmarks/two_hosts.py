"""How long is a step between two hosts, over the same step without exchange: ours, stock Horovod and DDP over Gloo?

Two hosts of one core each (see tests/support/two_hosts.py; needs root), one rank of 1 thread on each, a Llama of 15
million parameters, 4 x 128 tokens a rank, SGD; the link at 100 Mbit/s, at 1 Gbit/s and as fast as it can. All jobs are
started once and take turns of seconds (see jobs.py), at one rate after the other. A figure is the median over rounds of
the ratio of a median step to that of the ranks without exchange in the same round; 1 is an exchange that costs nothing.
`best` is that one of ours with the lowest median. `sent` is what leaves a host in a step, by its interface's counter,
over what all gradients are in fp32.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from common import Figure, figure, main, ratios
from host_jobs import HostsJob
from jobs import SGD, Setting, take_turns, warmed_up
from models import MODELS
from step import median_step_s

from hvdtrain.compression.table import parse
from hvdtrain.config.parse import parse_object
from hvdtrain.errors import ConfigError
from tests.support.two_hosts import UnavailableError, two_hosts

OURS = ("none", "fp16", "int8", "topk:0.01", "powersgd:4")
PEERS = ("stock_horovod", "stock_horovod_fp16", "ddp", "ddp_fp16", "ddp_powersgd")
QUICK = ("none", "fp16", "powersgd:4", "ddp", "ddp_fp16")
COMPUTE = "no_exchange"
ROUNDS: Mapping[str, tuple[str | None, int]] = {
    "unthrottled": (None, 3),
    "1gbit": ("1gbit", 4),
    "100mbit": ("100mbit", 2),
}
"""By name, the rate and how many rounds at it."""
WARM_UP, TURN_S, COUNTED = 4, 3.0, 4


def accepted(compression: str) -> bool:
    """Whether ours knows it, at both places."""
    try:
        parse_object({"parallel": {"compression": compression}}, None)
        parse(compression)
    except ConfigError as error:
        print(f"skipped {compression}: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def setting(compression: str = "none") -> Setting:
    further = {"parallel.compression": compression, "observe.stall_timeout_s": 0}
    return Setting("llama15m", 4, optimizer=SGD, clip=0.0, ours=further)


def at_rate(rate: str, seconds: Mapping[str, list[float]]) -> list[Figure]:
    compute = seconds[COMPUTE]
    over = {name: ratios(own, compute) for name, own in seconds.items() if name != COMPUTE}
    best = min((name for name in over if name in OURS), key=lambda name: statistics.median(over[name]))
    print(f"{rate}: the best of ours is {best}", flush=True)
    figures = [figure(f"two_hosts/{rate}/{_label(name)}", own, "ratio") for name, own in over.items()]
    figures.append(figure(f"two_hosts/{rate}/best", over[best], "ratio"))
    times = {name: [1e3 * s for s in own] for name, own in seconds.items()}
    return [*figures, *(figure(f"two_hosts/{rate}/{_label(name)}_ms", own, "ms") for name, own in times.items())]


def sent(jobs: Mapping[str, Any]) -> list[Figure]:
    """Of each of ours, what the interfaces count over the size of all gradients."""
    gradients = sum(4 * parameter.numel() for parameter in MODELS["llama15m"]().model.parameters())
    own = {name: jobs[name].bytes_a_step(COUNTED) / gradients for name in jobs if name in OURS}
    return [figure(f"two_hosts/sent/{_label(name)}", [share], "ratio") for name, share in own.items()]


def measure(quick: bool) -> list[Figure]:
    """All contenders at all rates; nothing where this machine cannot be made into two hosts."""
    try:
        return _measure(quick)
    except UnavailableError as reason:
        print(f"two_hosts is left out: {reason}", file=sys.stderr)
        return []


def _measure(quick: bool) -> list[Figure]:
    known = [name for name in OURS if accepted(name)]
    contenders = [COMPUTE, *(name for name in (*known, *PEERS) if not quick or name in QUICK)]
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        kinds = {name: ("ours", setting(name)) if name in OURS else (name, setting()) for name in contenders}
        starts = {name: partial(HostsJob, name, *kinds[name], hosts=hosts) for name in contenders}
        jobs = stack.enter_context(warmed_up(starts, WARM_UP))
        figures = sent(jobs)
        turn = partial(median_step_s, turn_s=TURN_S)
        for name, (rate, number) in ROUNDS.items():
            if not quick or name == "1gbit":
                hosts.throttle(rate)
                figures += at_rate(name, take_turns(jobs, turn, 1 if quick else number))
    return figures


def _label(name: str) -> str:
    return name.partition(":")[0]


if __name__ == "__main__":
    main(__doc__, measure)
