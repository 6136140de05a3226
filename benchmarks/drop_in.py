"""How long is a step of a Horovod script when only its import is changed, beside stock Horovod?

2 ranks of 1 thread, by MPI; by `hvdtrain.torch` as it is (gradients stay the user's tensors) and with
``gradient_as_bucket_view=True``. The jobs take turns of seconds (see jobs.py). A figure is the median over rounds of
the ratio of median step times of one round. Below 1 the first is faster.
"""

from __future__ import annotations

from common import Figure, figure, main, ratios
from jobs import race
from step import SETTINGS, WARM_UP, median_step_s

CONTENDERS = ("drop_in", "drop_in_views", "stock_horovod")
PAIRS = (("drop_in", "stock_horovod"), ("drop_in_views", "stock_horovod"), ("drop_in_views", "drop_in"))


def measure(quick: bool) -> list[Figure]:
    figures = []
    for model in ("llama15m",) if quick else ("llama15m", "comm_heavy"):
        starts = 1 if quick else 3
        seconds = race(CONTENDERS, SETTINGS[model], median_step_s, rounds=3, warm_up=WARM_UP, starts=starts)
        for a, b in PAIRS:
            figures.append(figure(f"drop_in/{a}_over_{b}/{model}", ratios(seconds[a], seconds[b]), "ratio"))
        for name in CONTENDERS:
            figures.append(figure(f"drop_in/{name}_ms/{model}", [1e3 * s for s in seconds[name]], "ms"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
