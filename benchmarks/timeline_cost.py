"""What does Horovod's own Timeline cost a step of the default model, on cores that the ranks fill?

2 ranks of 1 thread; all four jobs are ours and take turns of seconds (see jobs.py). A figure is the median over rounds
of the ratio of a job's median step time to that of the job without Timeline, in one round; equal jobs differ by some
percent of themselves.

- idle: Horovod is able to record, no window is open, and its writer's thread is left as Horovod starts it: it sleeps
  when `hvdtrain build-horovod` built it, and spins in others;
- resting: so too, but a thread that spins runs only where nothing else does;
- recording: a window is open.
"""

from __future__ import annotations

from dataclasses import replace

from common import Figure, figure, main, ratios
from jobs import race
from step import SETTINGS, WARM_UP, median_step_s

DEFAULT = SETTINGS["default"]
OFF = replace(DEFAULT, ours={"observe.timeline": "off"})
CONTENDERS = {
    "off": OFF,
    "idle": replace(OFF, variables={"HOROVOD_TIMELINE": "DYNAMIC"}),
    "resting": replace(DEFAULT, ours={"observe.timeline": "900000:900001"}),
    "recording": replace(DEFAULT, ours={"observe.timeline": "all"}),
}


def measure(quick: bool) -> list[Figure]:
    starts, rounds = (1, 2) if quick else (3, 3)
    seconds = race(list(CONTENDERS), CONTENDERS, median_step_s, rounds=rounds, warm_up=WARM_UP, starts=starts)
    return [
        figure(f"timeline_cost/{name}", ratios(seconds[name], seconds["off"]), "ratio")
        for name in CONTENDERS
        if name != "off"
    ]


if __name__ == "__main__":
    main(__doc__, measure)
