"""Steps of workers that train apart: a rank runs those of its workers alone, until all ranks agree on the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from hvdtrain.engine.outer import OuterFacts
from hvdtrain.engine.periodic import PeriodicEngine
from hvdtrain.spans import APART
from hvdtrain.training.loop.step import Stepper
from hvdtrain.training.loop.update import StepResult

_OF_STEP = 4
"""Numbers of each step: sums over workers of losses, weights, squared norms, and skipped steps."""


@dataclass
class WorkerSteps:
    """Runs windows of steps without a collective between workers."""

    engine: PeriodicEngine
    stepper: Stepper  # of all ranks, for the synchronous steps at the beginning; its engine is `engine`
    horizon: int  # last step of the schedule: then all workers are merged
    _own: Stepper | None = field(default=None, init=False)
    _results: list[list[StepResult]] = field(default_factory=list, init=False)

    def begin(self, step: int) -> bool:
        """Return whether workers train apart after step `step`; they begin if it is time. Collective: yes."""
        engine = self.engine
        if not engine.begun and step >= engine.plan.start_steps:
            engine.begin_workers(step)
        if engine.begun and self._own is None:
            links, whole = engine.links, self.stepper
            parts = [part.among(links.group) for part in whole.parts]
            batch = max(1, whole.global_batch // links.workers.count)
            self._own = replace(whole, engine=engine.inner, comm=links.group, global_batch=batch, parts=parts)
        return engine.begun

    def step(self, parts: Iterable[tuple[Callable[[], None], Any]], counts: Sequence[int]) -> None:
        """Run a step of each worker of this rank, with `counts` micro-batches of `parts`. Collective: in the group."""
        assert self._own is not None
        batches, engine = iter(parts), self.engine
        groups = [dict(group) for group in engine.optimizer.param_groups]
        results = []
        for number, (worker, count) in enumerate(zip(engine.links.served, counts, strict=True)):
            if number:  # a worker's optimizer may count in its groups
                for group, values in zip(engine.optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(values)
            engine.activate(worker)
            results.append(self._own.run(islice(batches, count), count, []))
        next(batches, None)  # what follows the last micro-batch
        self._results.append(results)
        with self.stepper.spans("wait"):
            engine.end_step()
        self.stepper.spans.record(APART, self.stepper.spans.now())

    def agree(self, step: int, values: Sequence[int]) -> tuple[list[StepResult], list[dict[str, Any]]]:
        """End a window after step `step`: return the results of its steps, equal on all ranks. Collective: yes.

        The last one has the sums of `values` over ranks. An outer step that is due begins. Also returns the journal's
        facts of those that have ended.
        """
        engine, spans = self.engine, self.stepper.spans
        links, results = engine.links, self._results
        self._results = []
        engine.park()
        count = _OF_STEP * len(results)
        numbers = torch.zeros(count + links.workers.count + len(values), dtype=torch.float64)
        numbers[count + links.workers.count :] = torch.tensor(values)
        if links.leaders is not None:
            for place, found in zip(numbers[:count].view(-1, _OF_STEP), results, strict=True):
                place += torch.tensor([_numbers(result) for result in found], dtype=torch.float64).sum(0)
            for index, worker in enumerate(links.served):
                numbers[count + worker] = sum(found[index].weight for found in results if found[index].applied)
        with spans("wait"):
            sums = self.stepper.comm.allreduce(numbers, name="workers/numbers").wait().tolist()
            engine.end_window(step, sums[count : count + links.workers.count], last=step == self.horizon)
            outer = self._outer_steps(engine.pop_facts())
        of_steps = [sums[start : start + _OF_STEP] for start in range(0, count, _OF_STEP)]
        summed = [round(value) for value in sums[count + links.workers.count :]]
        return [*(self._result(each, []) for each in of_steps[:-1]), self._result(of_steps[-1], summed)], outer

    def _outer_steps(self, facts: Sequence[OuterFacts]) -> list[dict[str, Any]]:
        """Return the figures of exchanges that have arrived, of all workers. Collective: yes, if there are any."""
        if not facts:
            return []
        links = self.engine.links
        numbers = torch.zeros(len(facts), 2, links.workers.count, dtype=torch.float64)
        if links.leaders is not None:
            for place, fact in zip(numbers, facts, strict=True):
                for index, worker in enumerate(links.served):
                    place[0, worker], place[1, worker] = float(fact.norms[index]), float(fact.cosines[index])
        sums = self.stepper.comm.allreduce(numbers, name="workers/outer").wait().tolist()
        return [_outer_step(fact, *of_workers) for fact, of_workers in zip(facts, sums, strict=True)]

    def _result(self, numbers: Sequence[float], sums: list[int]) -> StepResult:
        losses, weight, squares, skipped = numbers
        loss = losses / weight if weight > 0 else math.nan
        norm = math.sqrt(squares / self.engine.links.workers.count) if squares >= 0 else math.nan
        return StepResult(loss, weight, norm, not skipped and math.isfinite(loss), sums)


def _outer_step(fact: OuterFacts, norms: list[float], cosines: list[float]) -> dict[str, Any]:
    """Return the facts of an exchange, with the norms of the workers' changes, and their cosines to the mean one.

    `drift`: distance of a worker from the mean, over the norm of the mean change: root mean square over workers.
    """
    mean = fact.mean_norm
    squares = [n * n + mean**2 - 2 * n * mean * cosine for n, cosine in zip(norms, cosines, strict=True)]
    drift = math.sqrt(max(0.0, sum(squares) / len(squares))) / mean if mean else 0.0
    of_rank_0 = {"sent_bytes": fact.sent_bytes, "wait_s": fact.wait_s, "mean_norm": mean}
    found = {"at_step": fact.step, "fragment": fact.fragment, **of_rank_0}
    return {**found, "change_norms": norms, "cosines": cosines, "drift": drift}


def _numbers(result: StepResult) -> list[float]:
    if result.weight == 0:  # this worker's samples do not count in this step, which others apply
        return [0.0] * _OF_STEP
    return [result.loss * result.weight, result.weight, result.grad_norm**2, float(not result.applied)]
