"""Decide whether to record Horovod's own Timeline. Horovod must know before it starts.

``HOROVOD_TIMELINE=DYNAMIC`` in the environment of `hvd.init()` allows windows: `hvd.start_timeline(path)` and
`hvd.stop_timeline()`. From `hvd.init()` on it costs, even while no window is open (from Horovod 0.28.1's timeline.cc):

- a thread of rank 0 that polls for work without sleeping, a core's worth of time (`threads` limits it). In a quiet
  Horovod, from `hvdtrain build-horovod`, it sleeps for 10 ms between polls (`install.compiler`);
- bits for the negotiation, exchanged by every rank in each cycle: either all ranks have the variable or none, else the
  exchange fails. So the decision must be equal on all ranks, before they can communicate;
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
from hvdtrain.runtime.tuning import RECORD, our_variables, without_our_variables

VARIABLE = "HOROVOD_TIMELINE"
_DYNAMIC = "DYNAMIC"

AUTO_WINDOW = Window(10, 20)
"""After the first steps, which are not typical."""

ASK = f"--observe.timeline {AUTO_WINDOW.first}:{AUTO_WINDOW.last}"


@dataclass(frozen=True)
class TimelinePlan:
    """The plan for Horovod's Timeline.

    ``kind`` is off: not requested; window: recorded by us; theirs: set by the user, not touched; spans: not recorded,
    only our own spans.
    """

    kind: Literal["off", "window", "theirs", "spans"]
    window: Window = OFF  # the steps to record; `OFF` unless `kind` is window
    reason: str = ""
    quiet: bool = False  # whether its writer's thread sleeps while it has no work; otherwise it spins

    def __str__(self) -> str:
        if self.kind == "window":
            until = "on" if self.window.last is None else f"to {self.window.last}"
            return f"Horovod's Timeline of steps {self.window.first} {until}"
        what = {"off": "not wanted", "theirs": "left as the user set it", "spans": "only our own spans"}[self.kind]
        return f"{what}: {self.reason}" if self.reason else what


def decide(wanted: str, facts: Facts, *, quiet: bool) -> TimelinePlan:
    """Decide the plan. Pure.

    ``wanted``: the option ``observe.timeline``; ``facts``: without variables that we set; ``quiet``: of `BuildRecord`.
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
    """Yield reasons why an automatic Timeline might slow the training."""
    if CHANNEL in facts.already:
        yield "hvdtrain launch starts ranks one by one, and all ranks of a round need the same decision"
    if facts.info.size == 1:
        yield "one rank has nothing to exchange"
    if not facts.info.one_host:
        yield "ranks on several hosts cannot agree in advance that it is free on each host"
    if facts.host.gpus:
        yield "its cost on GPUs was not measured"
    if quiet:
        return
    if facts.host.quota:
        yield "its writer's thread would use CPU time of this container's quota"
    # own_cores may differ from rank to rank where a launcher binds them unevenly
    if replace(facts, host=replace(facts.host, own_cores=facts.host.cores)).cores_are_full:
        yield "its writer's thread needs a core, and the ranks use them all"


def prepare_timeline(wanted: str, info: RankInfo) -> TimelinePlan:
    """Decide the plan and set Horovod's variable; call it before Horovod is initialised.

    Call it after `tuning.prepare`, which removes variables of an earlier call.
    """
    now = environment.environ()
    before = without_our_variables(now)
    horovod = installed()
    quiet = horovod is not None and horovod.quiet
    plan = decide(wanted, Facts(info, read_host(before), already=before), quiet=quiet)
    if plan.window and VARIABLE not in before:
        record = json.dumps({**our_variables(now), VARIABLE: _DYNAMIC})
        environment.change_variables({VARIABLE: _DYNAMIC, RECORD: record})
    return plan
