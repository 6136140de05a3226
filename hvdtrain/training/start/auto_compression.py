"""`--parallel.compression auto`: train some steps without compression, measure link and coding, choose what pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.link_probe import probe_link
from hvdtrain.comm.objects import allgather_json, on_rank_0
from hvdtrain.compression.base import BucketShape
from hvdtrain.compression.coding_cost import CodingCost
from hvdtrain.compression.coding_probe import measure_coding
from hvdtrain.compression.table import auto_candidates
from hvdtrain.engine.in_all_copies import InAllCopies
from hvdtrain.exchange.buckets import Layout
from hvdtrain.plan.gradients import Gradient, spread_evenly
from hvdtrain.plan.plan import Plan, Ranks
from hvdtrain.runtime.host import HostFacts
from hvdtrain.timeline.whatif.evidence import Evidence, Job, median_parts, read_parts
from hvdtrain.timeline.whatif.fitting import fit_probed_link
from hvdtrain.timeline.whatif.predict import WORTH, choose_compression

_FIRST, _COUNT = 3, 5
"""Steps to measure. The first step learns the buckets, and the second one is the first to use them."""
_LINK_S = 0.5  # time to probe the link. At 1 Gbit/s the largest allreduces take 70 ms.


@dataclass
class CompressionTrial:
    """Measures steps, then chooses the compression of an exchange."""

    sums: InAllCopies  # the exchange; its compression is undecided
    comm: Comm
    device: torch.device
    host: HostFacts
    batch: tuple[int, int]  # (global batch, micro-batch) in samples
    event: Callable[[dict[str, Any]], None]
    say: Callable[[str], None]
    _count: int = 0
    _steps: list[dict[str, float]] = field(default_factory=list)
    _before_last_s: list[list[float]] = field(default_factory=list)

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Take a step's line of the journal; after the last one, choose. Collective: yes."""
        if not self.sums.undecided:
            return
        self._count += 1
        if self._count >= _FIRST:
            starts_ns = self.sums.reducer.start_times_ns()
            if self._before_last_s and len(starts_ns) != len(self._before_last_s[-1]):
                self._steps, self._before_last_s = [], []  # the plan of the buckets has changed
            self._steps.append(read_parts(record))
            self._before_last_s.append([(max(starts_ns) - ns) * 1e-9 for ns in starts_ns])
        if len(self._steps) == _COUNT:
            self._choose(record["step"])

    def _choose(self, step: int) -> None:
        layouts, names = self.sums.reducer.layouts(), ("none", *auto_candidates())
        measured = {
            "step_s": median(step["step"] for step in self._steps),
            "parts_s": median_parts(self._steps),
            "before_last_s": [median(column) for column in zip(*self._before_last_s, strict=True)],
            "allreduces": probe_link(self.comm, self.device, _LINK_S),
            "coding": {name: [asdict(cost) for cost in self._measure_coding(name, layouts)] for name in names},
        }
        everyone = allgather_json(self.comm, measured, name="auto_compression")

        def predict() -> tuple[dict[str, Any], str]:  # on rank 0 for all ranks, which must make the same choice
            try:
                return self._predict(layouts, everyone)
            except Exception as error:  # a prediction must not end a run
                why = f"the prediction failed: {type(error).__name__}: {error}"
                return {"compression": "none"}, f"compression: none: {why}"

        event, line = on_rank_0(self.comm, predict, name="auto_compression/choice")
        self.sums.set_compression(event["compression"])
        self.event({"event": "compression_chosen", "at_step": step, **event})
        self.say(line)

    def _measure_coding(self, name: str, layouts: Sequence[Layout]) -> Iterator[CodingCost]:
        """Measure one bucket at a time, so that buffers for all buckets need not fit next to the model."""
        compression, size = self.sums.resolve(name), self.comm.size
        for layout in layouts:
            yield from measure_coding(compression, [layout.shape], [[p.grad for p in layout.parameters]], size)

    def _predict(self, layouts: Sequence[Layout], everyone: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
        """Return the journal's event without its step, and the line for the user."""
        # The rank that waits least is the slowest one. The others wait for it, whatever the compression.
        slowest = min(everyone, key=lambda measured: measured["parts_s"]["wait"])
        step_s = max(measured["step_s"] for measured in everyone)
        allreduces = [
            (column[0][0], max(seconds for _, seconds in column))
            for column in zip(*(measured["allreduces"] for measured in everyone), strict=True)
        ]
        coding = {
            name: max(([CodingCost(**cost) for cost in rank["coding"][name]] for rank in everyone), key=_total_s)
            for name in everyone[0]["coding"]
        }
        evidence = self._evidence(layouts, step_s, slowest, allreduces)
        by_bucket = {
            (name, names[0]): cost
            for name, costs in coding.items()
            for names, cost in zip(evidence.buckets, costs, strict=True)
        }
        chosen, predicted = choose_compression(
            evidence,
            [name for name in coding if name != "none"],
            lambda compression, bucket, ranks: by_bucket[str(compression), bucket.names[0]],
        )
        link = evidence.fitted.link
        assert link is not None, "there are several ranks"
        event = {
            "compression": chosen,
            "step_s": step_s,
            "exposed_s": slowest["parts_s"]["wait"],
            "latency_s": allreduces[0][1],
            "bytes_per_s": 1 / link.s_per_byte,
            "predicted_step_s": {name: outcome.step_s for name, outcome in predicted.items()} | {"none": step_s},
            "cost_s": {name: _total_s(costs) for name, costs in coding.items()},
        }
        return event, _line(event, predicted["none"].wire_s)

    def _evidence(
        self, layouts: Sequence[Layout], step_s: float, rank: dict[str, Any], allreduces: Sequence[tuple[int, float]]
    ) -> Evidence:
        """Return the steps that a rank has measured in what-if's terms.

        The last bucket starts at the end of backward. Between two buckets, gradients are ready at an even pace.
        """
        shapes = [layout.shape for layout in layouts]
        job = Job(Ranks(self.comm.size, self.comm.local_size), Plan(), *self.batch)
        evidence = Evidence(
            job=job,
            cores=self.host.cores,
            own_cores=self.host.own_cores,
            threads=torch.get_num_threads(),
            on_cpu=self.device.type == "cpu",
            gradients=_gradients(shapes, rank["parts_s"]["backward"] / job.passes, rank["before_last_s"]),
            step_s=step_s,
            parts_s=rank["parts_s"],
            buckets=[[part.name for part in shape.parts] for shape in shapes],
            compression_of=self.sums.resolve,
        )
        # Not the link that explains the wait: ranks wait for late ranks too.
        return replace(evidence, fitted=fit_probed_link(evidence, allreduces))


def _gradients(shapes: Sequence[BucketShape], backward_s: float, before_last_s: Sequence[float]) -> list[Gradient]:
    gradients: list[Gradient] = []
    begin_s = 0.0
    for shape, before_s in sorted(zip(shapes, before_last_s, strict=True), key=lambda pair: -pair[1]):
        ready_s = max(begin_s, backward_s - before_s)
        found = [Gradient(part.name, tuple(part.stored_shape), shape.sizes.dtype) for part in shape.parts]
        spread = spread_evenly(found, ready_s - begin_s)
        gradients += [replace(g, ready_s=begin_s + (g.ready_s or 0.0)) for g in spread]
        begin_s = ready_s
    return gradients[::-1]


def _total_s(costs: Sequence[CodingCost]) -> float:
    return sum(cost.total_s for cost in costs)


def _line(event: Mapping[str, Any], wire_s: float) -> str:
    others = ", ".join(f"{name} {s * 1e3:.0f} ms" for name, s in event["predicted_step_s"].items() if name != "none")
    found = (
        f"a step takes {event['step_s'] * 1e3:.0f} ms, {event['exposed_s'] * 1e3:.0f} ms of it waiting for gradients;"
        f" the link carries {event['bytes_per_s'] * 8e-9:.2g} Gbit/s, so the exchange takes {wire_s * 1e3:.0f} ms;"
        f" predicted steps: {others}"
    )
    if event["compression"] == "none":
        return f"compression: none is worth its cost (a step would be less than {1 - WORTH:.0%} shorter): {found}"
    return f"compression: {event['compression']} from now on: {found}"
