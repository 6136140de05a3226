"""Whether Horovod's own Timeline is recorded: decided before Horovod starts, as it has to be told then.

``HOROVOD_TIMELINE=DYNAMIC`` in the environment of `hvd.init()` makes windows possible: `hvd.start_timeline(path)` and
`hvd.stop_timeline()`. From `hvd.init()` on it costs, also while no window is open (read in Horovod 0.28.1's
timeline.cc):

- a thread of rank 0 that looks for work without ever sleeping, a core's worth of time (`threads` tames it). In a
  Horovod that `hvdtrain build-horovod` built, a quiet one, it sleeps for 10 ms between two looks (`install.compiler`);
- bits for the negotiation, exchanged in each cycle by every rank: either all ranks have the variable or none,
  else the exchange breaks. So what decides has to be the same on all ranks, which have no way to talk yet;
- on GPUs an event for each part of each collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.config.windows import AUTO, OFF, Window, parse_window
from hvdtrain.install.record import installed
from hvdtrain.runtime import environment
from hvdtrain.runtime.channel import VARIABLE as CHANNEL
from hvdtrain.runtime.environment import NO_LAUNCHER, RankInfo
from hvdtrain.runtime.host import read_host
from hvdtrain.runtime.rules import Facts
from hvdtrain.runtime.tuning import RECORD, of_others, written_by_us

VARIABLE = "HOROVOD_TIMELINE"
_DYNAMIC = "DYNAMIC"

AUTO_WINDOW = Window(10, 20)
"""After the first steps, which are unlike the rest."""

ASK = f"--observe.timeline {AUTO_WINDOW.first}:{AUTO_WINDOW.last}"


@dataclass(frozen=True)
class TimelinePlan:
    """What becomes of Horovod's Timeline.

    Attributes:
        kind: off: not wanted; window: recorded by us; theirs: the user's own, left alone; spans: not recorded, our own
            spans are all there is.
        window: the steps to record; `OFF` unless `kind` is window.
        reason: why it is so.
        quiet: whether the thread that writes it sleeps while it has nothing to do; else it spins.
    """

    kind: Literal["off", "window", "theirs", "spans"]
    window: Window = OFF
    reason: str = ""
    quiet: bool = False

    def __str__(self) -> str:
        if self.kind == "window":
            until = "on" if self.window.last is None else f"to {self.window.last}"
            return f"Horovod's Timeline of steps {self.window.first} {until}"
        what = {"off": "not wanted", "theirs": "left as the user set it", "spans": "only our own spans"}[self.kind]
        return f"{what}: {self.reason}" if self.reason else what


def decide(wanted: str, facts: Facts, *, quiet: bool) -> TimelinePlan:
    """Decide what becomes of Horovod's Timeline. Pure.

    Args:
        wanted: the option ``observe.timeline``: off, auto, all or FIRST:LAST.
        facts: `already` without what we ourselves wrote there.
        quiet: whether the Horovod that is installed is so (`BuildRecord.quiet`).
    """
    theirs = facts.already.get(VARIABLE)
    # An empty name opens no file and makes windows possible, as DYNAMIC does.
    is_open = theirs in (_DYNAMIC, "")
    if wanted == "off":
        return TimelinePlan("off")
    if theirs is not None and (wanted == AUTO or not is_open):
        return TimelinePlan("theirs", reason=f"{VARIABLE}={theirs} is set")
    if facts.info.launcher == NO_LAUNCHER:
        return TimelinePlan("spans", reason="one process alone has no use for Horovod")
    if wanted != AUTO:
        return TimelinePlan("window", parse_window(wanted, "observe.timeline", AUTO), quiet=quiet)
    reason = next(_costs(facts, quiet), None)
    return TimelinePlan("spans", reason=reason) if reason else TimelinePlan("window", AUTO_WINDOW, quiet=quiet)


def _costs(facts: Facts, quiet: bool) -> Iterator[str]:
    """Why a Timeline that nobody asked for might slow the training."""
    if CHANNEL in facts.already:
        yield "hvdtrain launch starts ranks one by one, and all that meet must have decided alike"
    if facts.info.size == 1:
        yield "one rank has nothing to exchange"
    if not facts.info.one_host:
        yield "ranks on several hosts cannot agree beforehand that it costs nothing on each of them"
    if facts.host.gpus:
        yield "what it costs on GPUs was not measured"
    if quiet:
        return
    if facts.host.quota:
        yield "the time of its writer's thread would be taken from this container's quota"
    # own_cores may differ from rank to rank where a launcher binds them unevenly
    if replace(facts, host=replace(facts.host, own_cores=facts.host.cores)).cores_are_full:
        yield "its writer's thread wants a core, and the ranks fill them all"


def prepare_timeline(wanted: str, info: RankInfo) -> TimelinePlan:
    """Decide, and write what Horovod has to find in the environment; before Horovod is initialised.

    It comes after `tuning.prepare`, which takes back what an earlier call wrote.
    """
    now = environment.environ()
    before = of_others(now)
    horovod = installed()
    quiet = horovod is not None and horovod.quiet
    plan = decide(wanted, Facts(info, read_host(before), already=before), quiet=quiet)
    if plan.window and VARIABLE not in before:
        record = json.dumps({**written_by_us(now), VARIABLE: _DYNAMIC})
        environment.change_variables({VARIABLE: _DYNAMIC, RECORD: record})
    return plan
