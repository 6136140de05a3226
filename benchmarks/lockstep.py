"""How much of a step's loss to exchange is two ranks waiting for each other, whatever they send?

The shipped default on 2 ranks of 1 thread: `lockstep` is the loop without exchange with a barrier before each optimizer
step. No exchange that is synchronous takes less. The jobs take turns of seconds (see jobs.py); a figure is the median
over rounds of the ratio of median step times to those of the loop in which no rank waits.
"""

from __future__ import annotations

from common import Figure, figure, main, ratios
from jobs import race
from step import SETTINGS, WARM_UP, median_step_s

CONTENDERS = ("no_exchange", "lockstep", "ours")


def measure(quick: bool) -> list[Figure]:
    starts = 1 if quick else 6
    seconds = race(CONTENDERS, SETTINGS["default"], median_step_s, rounds=3, warm_up=WARM_UP, starts=starts)
    base = seconds["no_exchange"]
    return [figure(f"lockstep/{name}", ratios(seconds[name], base), "ratio") for name in CONTENDERS[1:]]


if __name__ == "__main__":
    main(__doc__, measure)
