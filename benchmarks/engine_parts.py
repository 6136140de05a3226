"""Where is the time of a step, with and without a divided optimizer?

2 ranks of 1 thread, a Llama of 15 million parameters, 4 x 128 tokens a rank, AdamW, clipping, as in engines.py. All
jobs take turns of seconds (see jobs.py). A figure is the median over rounds of the median of a part of a step, by the
journal; `wait` is the exposed exchange of gradients, `gather` that of parameters.
"""

from __future__ import annotations

import statistics

from common import Figure, figure, main
from engines import TURN_S, WARM_UP, kind
from jobs import Job, race

from hvdtrain.timeline.whatif.evidence import read_parts

CONTENDERS = ("replicated", "zero1", "zero2")
PARTS = ("forward", "backward", "wait", "gather", "clip", "optimizer", "step")


def part_medians_ms(job: Job) -> dict[str, float]:
    """Return the median of each part in one turn."""
    steps = [read_parts(step) for step in job.turn(TURN_S)]
    return {part: 1e3 * statistics.median(step[part] for step in steps) for part in PARTS}


def measure(quick: bool) -> list[Figure]:
    settings = {name: kind(name)[1] for name in CONTENDERS}
    starts, rounds = (1, 2) if quick else (3, 3)
    found = race(CONTENDERS, settings, part_medians_ms, rounds=rounds, warm_up=WARM_UP, starts=starts)
    return [
        figure(f"engine_parts/{part}/{name}", [turn[part] for turn in found[name]], "ms")
        for part in PARTS
        for name in CONTENDERS
    ]


if __name__ == "__main__":
    main(__doc__, measure)
