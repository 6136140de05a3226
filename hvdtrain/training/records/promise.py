"""Promises when a run ends, and says when that does not hold any more, by what, and since when."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any

import numpy as np

from hvdtrain.observe.sinks import Record
from hvdtrain.spans import JOURNAL_KEYS
from hvdtrain.timeline import wording
from hvdtrain.timeline.analysis.analysis import Estimate
from hvdtrain.timeline.analysis.ending import Ending, Pace, due, ending
from hvdtrain.timeline.analysis.stats import mean_of

_FIRST_STEPS = 5  # of a start, which warm up
_LATEST = 4  # the first promise waits for an evaluation and a checkpoint, but not beyond this part of the run
_MOST_BLOCKS = 64
_NAMES = {"wait": "the wait for sums", "gather": "the wait for parameters", "activations": "the wait for activations"}


@dataclass
class _Block:
    """Consecutive steps: the first one, their seconds, and sums of their parts."""

    first: int
    begin_s: float
    seconds: array[float] = field(default_factory=lambda: array("d"))
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def part_s(self, name: str) -> float:
        """Return the mean of a part."""
        return self.parts[name] / len(self.seconds)

    @property
    def mean_s(self) -> float:
        """The mean of a step."""
        return sum(self.seconds) / len(self.seconds)


@dataclass
class Promise:
    """A sink that promises once enough was measured, and again when a promise is broken, or ranks have changed."""

    stop: int  # the last step
    evaluate_every: int
    save_every: int
    say: Callable[[str], None]  # shows a line
    event: Callable[[dict[str, Any]], None]  # records one
    least_s: float = 30.0
    least_steps: int = 30
    """For the first promise, and between two looks at whether it holds."""
    round_steps: int = 1
    """Steps between two exchanges of workers that train apart: only whole rounds tell how long a step takes."""

    def __post_init__(self) -> None:
        self.least_steps = -(-self.least_steps // self.round_steps) * self.round_steps
        self._begin()

    def write(self, record: Record) -> None:
        """Note a step, an evaluation, or that ranks have changed."""
        name = record.get("event")
        if name == "started":
            self._begin()
        elif name == "evaluation":
            self._evaluations.append(float(record["seconds"]))
        elif name is None:
            self._step(record)

    def close(self) -> None:
        """Do nothing."""

    def _begin(self) -> None:
        self._evaluations: list[float] = []
        self._saves: list[float] = []
        self._evaluated = self._seen = 0  # evaluations before the newest step; steps
        self._last_s = 0.0
        self._blocks: list[_Block] = []  # since the promise, without some of the middle
        self._steps, self._steps_s = 0, 0.0  # all steps since the promise
        self._pace: Pace | None = None  # that it is based on
        self._usual_s: dict[str, float] = {}  # parts of a step then
        self._end_s = Estimate(0.0, 0.0, 0.0)  # since 1970

    def _step(self, record: Record) -> None:
        step, now_s, step_s = record["step"], float(record["time"]), float(record["step_s"])
        pause_s = now_s - self._last_s - step_s - sum(self._evaluations[self._evaluated :])
        if self._seen and self.save_every and (step - 1) % self.save_every == 0:
            self._saves.append(max(0.0, pause_s))
        self._evaluated, self._last_s, self._seen = len(self._evaluations), now_s, self._seen + 1
        if self._seen <= _FIRST_STEPS or step >= self.stop:
            return
        if not self._blocks or self._is_whole(now_s - step_s):
            self._blocks.append(_Block(step, now_s - step_s))
        block = self._blocks[-1]
        block.seconds.append(step_s)
        self._steps, self._steps_s = self._steps + 1, self._steps_s + step_s
        for part, key in JOURNAL_KEYS.items():
            block.parts[part] += float(record.get(key, 0.0))
        if self._is_whole(now_s):
            recent = self._recent()
            seconds = np.concatenate([block.seconds for block in recent])
            others_s = (float(np.mean(found)) if found else 0.0 for found in (self._evaluations, self._saves))
            pace = Pace(0, len(seconds), mean_of(seconds), 0.0, *others_s)
            if self._pace is None:
                if (self._evaluations and self._saves) or _LATEST * step > self.stop:
                    self._promise(step, now_s, pace, "")
            elif now_s + self._left(pace, step).seconds.low > self._end_s.high:
                self._promise(step, now_s, pace, self._why(step, now_s, pace, recent))
            del self._blocks[1:-_MOST_BLOCKS]

    def _is_whole(self, now_s: float) -> bool:
        block = self._blocks[-1]
        return len(block.seconds) >= self.least_steps and now_s - block.begin_s >= self.least_s

    def _recent(self) -> list[_Block]:
        """Return the last blocks that are about as slow as the last one, without that in which they became so.

        All blocks if there are none.
        """
        if self._pace is None:
            return self._blocks
        least_s = (self._pace.step_s.value + self._blocks[-1].mean_s) / 2
        slow = list(takewhile(lambda block: block.mean_s >= least_s, reversed(self._blocks)))[-2::-1]
        return slow or self._blocks

    def _due(self, step: int) -> tuple[int, int]:
        return due(step, self.stop, self.evaluate_every), due(step, self.stop, self.save_every)

    def _left(self, pace: Pace, step: int) -> Ending:
        return ending(pace, self.stop - step, *self._due(step), is_same_job=True)

    def _promise(self, step: int, now_s: float, pace: Pace, why: str) -> None:
        left = self._left(pace, step).seconds
        missed_s = 0.0 if self._pace is None else now_s + left.value - self._end_s.value  # it may be as much again
        left = Estimate(left.value, left.low, max(left.high, left.value + missed_s))
        self._pace, self._end_s = pace, Estimate(now_s + left.value, now_s + left.low, now_s + left.high)
        self._usual_s = {part: self._blocks[-1].part_s(part) for part in JOURNAL_KEYS}
        self._steps, self._steps_s = 0, 0.0
        self._blocks, self._evaluations, self._saves = [], self._evaluations[-1:], self._saves[-1:]
        self._evaluated = len(self._evaluations)
        end = {"end": self._end_s.value, "low": self._end_s.low, "high": self._end_s.high}
        self.event({"event": "promise", "at_step": step, **end, **({"why": why} if why else {})})
        self.say(f"{why or 'the run '}ends at {_clock(self._end_s.value)}, in {wording.durations(left)}")

    def _why(self, step: int, now_s: float, pace: Pace, recent: list[_Block]) -> str:
        """Return what delays the end most, and since when."""
        was, (evaluations, saves) = self._pace, self._due(step)
        assert was is not None
        more_s = pace.step_s.value - was.step_s.value
        grown = {part: self._blocks[-1].part_s(part) - usual_s for part, usual_s in self._usual_s.items()}
        part = max(grown, key=grown.__getitem__)
        repeated = self._steps - (step - self._blocks[0].first + 1)
        usual_s = was.evaluation_s * (len(self._evaluations) - 1) + was.save_s * (len(self._saves) - 1)
        between_s = now_s - self._blocks[0].begin_s - self._steps_s - usual_s
        ways = [
            (
                more_s * (self.stop - step) + self._steps_s - self._steps * was.step_s.value,
                f"since step {recent[0].first:,} a step takes {_ms(pace.step_s.value)} ms instead of"
                f" {_ms(was.step_s.value)} ms, {_NAMES.get(part, part)} {_ms(grown[part])} ms more",
            ),
            (
                (pace.evaluation_s - was.evaluation_s) * (evaluations + len(self._evaluations)),
                f"evaluations take {pace.evaluation_s:.1f} s instead of {was.evaluation_s:.1f} s",
            ),
            (
                (pace.save_s - was.save_s) * (saves + len(self._saves)),
                f"checkpoints stop training for {pace.save_s:.1f} s instead of {was.save_s:.1f} s",
            ),
            (repeated * was.step_s.value, f"{repeated:,} steps were repeated after roll backs"),
            (between_s, f"{between_s:.0f} s more passed between steps"),
        ]
        return f"the end at {_clock(self._end_s.value)} does not hold: {max(ways)[1]}; it "


def _ms(seconds: float) -> str:
    return wording.ms(1e3 * seconds)


def _clock(seconds: float) -> str:
    """Format a time since 1970 as one of this host's day, with the date where that is another one."""
    then, now = datetime.fromtimestamp(seconds), datetime.now()
    return then.strftime("%H:%M" if then.date() == now.date() else "%Y-%m-%d %H:%M")
