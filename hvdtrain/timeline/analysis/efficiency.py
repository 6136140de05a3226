"""Where the peak of the devices goes, and how well the number of ranks pays off. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvdtrain.observe.cost import as_mapping
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.observe.scalars import numbers
from hvdtrain.timeline.analysis.analysis import Budget, Efficiency, Scaling
from hvdtrain.timeline.analysis.budget import ASIDE, LATE
from hvdtrain.timeline.analysis.rank_steps import start_up_steps
from hvdtrain.timeline.columns import RunTrace

_COMPUTE = ("forward", "backward")
_FULL = 4 / 3
"""FLOPs of forward, backward and a second forward pass, over those of the first two."""
_LEAST_STEPS = 16


def efficiency(run: RunTrace, budget: Budget | None) -> Efficiency | None:
    """Return the share of the peak that training uses (MFU), and what the rest is lost to; None if it is unknown.

    MFU, as PaLM defines it (https://arxiv.org/abs/2204.02311), counts the FLOPs of the model alone.
    """
    known = numbers({key: run.events.get("flops", {}).get(key) for key in ("per_sample", "peak_per_s")})
    samples = as_mapping(run.config.get("train")).get("global_batch")
    if budget is None or not budget.steps or len(known) < 2 or not isinstance(samples, int):
        return None
    step_s = budget.step_ms.value / 1e3
    used = known["per_sample"] * samples / (known["peak_per_s"] * step_s) if known["peak_per_s"] * step_s > 0 else 0.0
    shares = {part.name: part.share for part in budget.parts}
    computing = sum(shares.get(name, 0.0) for name in _COMPUTE)
    again = 0.0
    if as_mapping(run.config.get("memory")).get("checkpointing") == "full":
        again = computing * (1 - 1 / _FULL)
    lost = {
        "kernels below the peak": computing - again - used,
        "recomputation": again,
        "exposed communication": sum(share for n, share in shares.items() if n in budget.exposed and n != LATE),
        LATE: shares.get(LATE, 0.0),
        "input": shares.get("data", 0.0),
        "optimizer": shares.get("optimizer", 0.0),
        ASIDE: shares.get(ASIDE, 0.0),
    }
    lost["rest"] = max(0.0, 1 - used - sum(lost.values()))
    if not 0 < used < 1 or lost["kernels below the peak"] < 0:  # the peak is not that of these devices
        return None
    return Efficiency(used, {name: share for name, share in lost.items() if share > 0})


def scaling(starts: Sequence[JournalStart]) -> Scaling | None:
    """Compare the speed of a device in the last start with that in a start of fewer devices of the same run.

    A step has the same samples in all starts, so the speed of a device is 1 / (devices x median step).
    None if all starts have equally many ranks.
    """
    speeds: dict[int, float] = {}
    for start in starts:
        size = start.started.get("size")
        seconds = np.frombuffer(start.seconds) if len(start.seconds) else np.zeros(0)
        seconds = seconds[start_up_steps(seconds) :] if len(seconds) >= _LEAST_STEPS else seconds[:0]
        if isinstance(size, int) and size > 0 and len(seconds) and (usual := float(np.median(seconds))) > 0:
            speeds[size] = 1 / (size * usual)
            last = size
    if len(speeds) < 2 or last == (fewest := min(speeds)):
        return None
    return Scaling(fewest, last, speeds[last] / speeds[fewest])


def rows(found: Efficiency) -> Mapping[str, float]:
    """Return shares of the peak that sum to 1, from what training uses on."""
    return {"training (MFU)": found.mfu, **found.lost}
