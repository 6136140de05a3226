"""What a job left of its way through a fault, and how the seconds of it divide. Pure, but for reading files.

A recovery begins with the kill and goes through marks:

====================  ====================================  ============================  =============================
mark                  ours                                  stock Horovod's elastic       torchrun
====================  ====================================  ============================  =============================
failed  (detect)      the survivor has left its round       the error has reached the     all processes were ended, new
                                                            script                        ones begin to run it
met  (rendezvous)     the ranks of the next round are       they have, and training       they have imported torch and
                      connected                             begins anew                   made a process group
restored (restore)    the state of all is equal             the last commit is back, and  the model is made, the
                                                            broadcast                     checkpoint loaded
step                  the first one is done                 so                            so
====================  ====================================  ============================  =============================
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hvdtrain.observe.past_journal import journal_lines

FAILED, MET, RESTORED, STEP = "failed", "met", "restored", "step"


@dataclass(frozen=True)
class Mark:
    """Something that a process came to.

    Attributes:
        time: seconds since 1970.
        kind: failed, met, restored or step.
        step: number of the one that was done, 0 for other marks.
        size: ranks there are, 0 where it does not say.
        rank: of the process, -1 where it does not say.
        pid: of the process, 0 where it does not say.
    """

    time: float
    kind: str
    step: int = 0
    size: int = 0
    rank: int = -1
    pid: int = 0


@dataclass(frozen=True)
class Recovery:
    """Seconds from a kill, in parts that add up, and what was lost.

    Attributes:
        detect_s, rendezvous_s, restore_s, step_s: between the marks; the last ends with the first step.
        passed_s: from the kill until a step is done that was not done before it.
        lost_steps: that had been done and were done again.
    """

    detect_s: float
    rendezvous_s: float
    restore_s: float
    step_s: float
    passed_s: float
    lost_steps: int

    @property
    def seconds(self) -> float:
        """From the kill to the end of the first step after it."""
        return self.before_step_s + self.step_s

    @property
    def before_step_s(self) -> float:
        """From the kill until training goes on."""
        return self.detect_s + self.rendezvous_s + self.restore_s


def split(marks: Iterable[Mark], killed_s: float) -> Recovery | None:
    """The recovery from the kill at `killed_s`; None while it is under way.

    A step that ends after the kill, before the fault is known, was done by it.
    """
    ordered = sorted(marks, key=lambda mark: mark.time)
    found = [killed_s]
    for kind in (FAILED, MET, RESTORED, STEP):
        mark = next((m for m in ordered if m.time > found[-1] and m.kind == kind), None)
        if mark is None:
            return None
        found.append(mark.time)
    failed_s, restored_s = found[1], found[3]
    before = max((m.step for m in ordered if m.kind == STEP and m.time <= failed_s), default=0)
    after = [m for m in ordered if m.kind == STEP and m.time > restored_s]
    passed = next((m.time for m in after if m.step > before), None)
    if passed is None:
        return None
    parts = [end - start for start, end in pairwise(found)]
    return Recovery(*parts, passed_s=passed - killed_s, lost_steps=before + 1 - after[0].step)


@dataclass(frozen=True)
class Return:
    """A replacement joined.

    Attributes:
        standstill_s: from the last step without it to the first with it, less what a step takes.
        whole_s: from the kill to that first step.
    """

    standstill_s: float
    whole_s: float


def come_back(marks: Iterable[Mark], killed_s: float, size: int) -> Return | None:
    """How `size` ranks were reached again after fewer had gone on; None where that has not been so far.

    Errors:
        StatisticsError: fewer than three steps before the kill.
    """
    steps = sorted((m for m in marks if m.kind == STEP), key=lambda mark: mark.time)
    ends = sorted({m.step: m.time for m in reversed(steps) if m.time <= killed_s}.values())
    usual_s = statistics.median(end - start for start, end in pairwise(ends))
    fewer = [m for m in steps if m.time > killed_s and m.size < size]
    if not fewer:
        return None
    whole = next((m for m in steps if m.time > fewer[0].time and m.size == size), None)
    if whole is None:
        return None
    last = max(m.time for m in fewer if m.time < whole.time)
    return Return(whole.time - last - usual_s, whole.time - killed_s)


def of_peer(folder: Path) -> list[Mark]:
    """The marks that the processes of a peer left."""
    return [Mark(**line) for file in folder.glob("*.marks") for line in _lines(file)]


def of_ours(journal: Path, events: Path) -> list[Mark]:
    """The marks of a job of ours: from its journal, and from what `hvdtrain launch --events` wrote."""
    marks = [Mark(e["wall_s"], FAILED) for e in _lines(events) if e["event"] == "join" and e["why"] == "failed"]
    size = 0
    for line in journal_lines(journal) if journal.exists() else ():
        kind = {"started": MET, "resumed": RESTORED, None: STEP}.get(line.get("event"), "")
        size = line.get("size", size) if kind == MET else size
        if kind:
            marks.append(Mark(line["time"], kind, line.get("step", 0) if kind == STEP else 0, size))
    return marks


def _lines(file: Path) -> Iterable[Mapping[str, Any]]:
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # it is being written
            return


def kill_at(ends: Sequence[float], phase: float, clock: Callable[[], float]) -> float:
    """How long to wait from now, so that a kill comes at `phase` (0 to 1) of a step, by the ends of those before."""
    usual_s = statistics.median(end - start for start, end in pairwise(ends))
    wanted = ends[-1] + phase * usual_s
    while wanted < clock():
        wanted += usual_s
    return wanted - clock()
