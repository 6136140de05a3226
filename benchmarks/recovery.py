"""One of two ranks is killed by SIGKILL: how long until training goes on, beside stock Horovod's elastic and torchrun?

All train the default language model on this machine, two ranks of one thread, a global batch of 2 x 4 samples that
stays what it is when one rank is left, which then does twice the work a step.

- Ours: `hvdtrain launch --elastic 1:2`. The survivor goes on with the state that it holds: no step is lost. A
  checkpoint each 10 steps, which the recovery does not need. A replacement is started and taken in when it is ready.
- Stock: `horovodrun --host-discovery-script`, on two hosts that are this machine, since the host of a dead rank is put
  on a blacklist (for 1 to 2 s here; for good by default). A commit of `TorchState` each 10 steps (its own examples:
  each 100); the survivor goes back to it, the steps since are done again. A replacement is waited for as it starts.
- torchrun: DDP over Gloo, `--max-restarts`, a store of its own for each start (`recovery_jobs.VARIABLES`). All
  processes are ended and start anew, at full size, from a checkpoint each 10 steps; the steps since are done again.

In turns, each job anew, with the kill after four of the ten steps, at another point of the fifth each time. Three times
count: until training goes on (`before_step`), to the end of the first step (`seconds`), and until a step is done that
had not been done before (`passed`). `recovery_marks` says what the parts are. Also: how long training stands still
while a replacement joins, beyond what a step takes (`standstill`), and when it is whole again.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from common import Figure, figure, main, ratios
from recovery_jobs import COMMANDS, RANKS, ElasticJob
from recovery_marks import STEP, Mark, Recovery, Return, come_back, kill_at, split
from recovery_peer import EVERY

KILL_AFTER = EVERY + EVERY // 2 - 1
RETURN_S = 60
PARTS = ("seconds", "detect_s", "rendezvous_s", "restore_s", "step_s", "before_step_s", "passed_s", "lost_steps")
COMPARED = {"seconds": "", "before_step_s": "/before_step", "passed_s": "/passed"}

Found = dict[str, list[tuple[Recovery, Return | None]]]
"""Of each contender, round by round; nothing of a return to full size where there was none."""


def disturbed(name: str, phase: float) -> tuple[Recovery, Return | None]:
    """Start a job, kill its rank 1 at that part of a step, watch."""
    with tempfile.TemporaryDirectory() as folder:
        job = ElasticJob(name, Path(folder))
        try:
            ends = job.until(ends_of_enough)
            time.sleep(kill_at(ends, phase, time.time))
            killed_s = job.kill_rank_1()
            found = job.until(lambda marks: split(marks, killed_s))
            if name == "torchrun":
                return found, None  # all of it started anew
            try:
                return found, job.until(lambda marks: come_back(marks, killed_s, RANKS), RETURN_S)
            except TimeoutError:
                return found, None
        finally:
            job.end()


def ends_of_enough(marks: list[Mark]) -> list[float] | None:
    """When steps ended, once there are as many as the kill waits for."""
    ends: dict[int, float] = {}
    for mark in sorted(marks, key=lambda m: m.time):
        if mark.kind == STEP:
            ends.setdefault(mark.step, mark.time)
    return list(ends.values()) if max(ends, default=0) >= KILL_AFTER else None


def measure(quick: bool) -> list[Figure]:
    rounds = 2 if quick else 5
    found: Found = {name: [] for name in COMMANDS}
    for number in range(rounds):
        for name in COMMANDS:
            found[name].append(disturbed(name, (number + 0.5) / rounds))
    return [*seconds(found), *compared(found)]


def seconds(found: Found) -> list[Figure]:
    figures = []
    for name, results in found.items():
        prefix = "recovery/" if name == "ours" else f"recovery/{name}_"
        figures += [
            figure(prefix + part, [getattr(r, part) for r, _ in results], "steps" if part == "lost_steps" else "s")
            for part in PARTS
        ]
        back = [r for _, r in results if r is not None]
        if back:
            figures.append(figure(f"{prefix}standstill_s", [r.standstill_s for r in back], "s"))
            figures.append(figure(f"{prefix}whole_s", [r.whole_s for r in back], "s"))
    return figures


def compared(found: Found) -> list[Figure]:
    figures = []
    pairs = [(ours, stock) for (_, ours), (_, stock) in zip(found["ours"], found["stock"], strict=True)]
    whole = [ours.standstill_s / stock.standstill_s for ours, stock in pairs if ours is not None and stock is not None]
    if whole:
        figures.append(figure("recovery/vs_stock/standstill", whole, "x"))
    for peer in ("stock", "torchrun"):
        for part, suffix in COMPARED.items():
            ours, theirs = ([getattr(r, part) for r, _ in found[name]] for name in ("ours", peer))
            figures.append(figure(f"recovery/vs_{peer}{suffix}", ratios(ours, theirs), "x"))
    return figures


if __name__ == "__main__":
    main(__doc__, measure)
