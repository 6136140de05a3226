"""How long is a step of the default model, beside two ranks without exchange, DDP over Gloo and stock Horovod?

2 ranks of 1 thread. The four jobs take turns of seconds (see jobs.py). A figure is the median over rounds of the ratio
of median step times of one round; only steps that lie within a turn count, not its first. Below 1 ours is faster.
`..._over_no_exchange` is the peer's step over that without exchange.
"""

from __future__ import annotations

import statistics

from common import Figure, figure, main, ratios
from jobs import Job, Setting, race

WARM_UP, TURN_S = 4, 4.0
SETTINGS = {
    "default": Setting("default", 4, passes=2),
    "llama15m": Setting("llama15m", 4),
    # 60 million parameters and 16 tokens a rank; plain SGD, so that the exchange is what the step is about
    "comm_heavy": Setting(
        "llama60m", 1, optimizer={"name": "sgd", "lr": 2e-3, "momentum": 0.0, "weight_decay": 0.0}, clip=0.0
    ),
}
CONTENDERS = ("ours", "no_exchange", "ddp", "stock_horovod")


def median_step_s(job: Job, turn_s: float = TURN_S) -> float:
    return statistics.median(step["step_s"] for step in job.turn(turn_s))


def measure(quick: bool) -> list[Figure]:
    figures = []
    for model in ("default",) if quick else SETTINGS:
        starts, rounds = (1, 2) if quick else (5, 3)
        seconds = race(CONTENDERS, SETTINGS[model], median_step_s, rounds=rounds, warm_up=WARM_UP, starts=starts)
        suffix = "" if model == "default" else f"/{model}"
        for name in CONTENDERS[1:]:
            figures.append(figure(f"step/{name}{suffix}", ratios(seconds["ours"], seconds[name]), "ratio"))
        for name in ("ddp", "stock_horovod"):
            over = ratios(seconds[name], seconds["no_exchange"])
            figures.append(figure(f"step/{name}_over_no_exchange{suffix}", over, "ratio"))
        for name in CONTENDERS:
            figures.append(figure(f"step/{name}_ms{suffix}", [1e3 * s for s in seconds[name]], "ms"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
