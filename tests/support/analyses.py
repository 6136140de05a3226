"""Analyses as they could come of runs of any number of ranks, and of hostile ones."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hvdtrain.observe.cost import Cost
from hvdtrain.timeline.analysis.analysis import (
    Analysis,
    Blame,
    Budget,
    Carrier,
    Cause,
    Communication,
    Efficiency,
    Estimate,
    Finding,
    Mark,
    Memory,
    Moment,
    OverTime,
    Part,
    RankRow,
    Scaling,
)
from hvdtrain.timeline.analysis.goodput import Goodput

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">'\"&amp;"

_PARTS = {
    "data": 6.0,
    "forward": 96.4,
    "backward": 181.2,
    "waiting for late ranks": 12.3,
    "negotiation": 3.1,
    "transfer": 25.9,
    "optimizer": 19.6,
    "evaluations and checkpoints": 4.1,
    "rest": 3.8,
}
_EXPOSED = ("waiting for late ranks", "negotiation", "transfer")
_MODULES = ("model.embed_tokens", "model.layers.{}.mlp.experts.gate_up", "model.layers.{}.self_attn.q_proj", "lm_head")


def about(value: float, spread: float = 0.05) -> Estimate:
    return Estimate(value, value * (1 - spread), value * (1 + spread))


def parts(of: dict[str, float]) -> list[Part]:
    whole = sum(of.values())
    return [Part(name, about(ms), ms / whole) for name, ms in of.items()]


def budget(size: int) -> Budget:
    what = "rank 0" if size == 1 else f"mean of {size} ranks"
    return Budget(what, about(sum(_PARTS.values()), 0.01), 380, parts(_PARTS), _EXPOSED)


def rank_rows(size: int, late: dict[int, float]) -> list[RankRow]:
    chance, rows = random.Random(5), []
    for rank in range(size):
        cost = late.get(rank, 0.0)
        estimate = about(cost, 0.09) if cost else Estimate(0.0, -0.2, chance.uniform(0.1, 0.4))
        timed = {
            "data": chance.gauss(6, 0.2) + 0.9 * cost,
            "forward": chance.gauss(96, 1),
            "backward": chance.gauss(181, 1.5),
            "wait": max(0.0, 41.3 - cost + chance.gauss(0, 1)),
            "optimizer": chance.gauss(19.6, 0.2),
        }
        share = 0.93 if cost else 0.07 / size
        rows.append(RankRow(rank, f"node-{rank // 8}", share, estimate, timed, 0.0 if rank == 0 else 0.02))
    return sorted(rows, key=lambda row: -row.cost_ms.value)


def analysis(size: int, *, late: bool = True) -> Analysis:
    """A run of ranks. With `late`, one of them costs 12.3 ms a step."""
    who = min(3, size - 1) if late and size > 1 else -1
    costs = {who: 12.3} if who >= 0 else {}
    causes = {
        who: [
            Cause("data", 11.2, "waits for data 11.2 ms a step more than the others (17.2 against 6.0)"),
            Cause("cpu", None, "its training thread had no core for 8% of the time"),
        ]
    }
    blame = Blame(
        "stamps" if size > 1 else "none",
        380,
        rank_rows(size, costs) if size > 1 else [],
        sorted(costs),
        {rank: causes[rank] for rank in costs},
        "" if costs else "no rank costs more than 0.4 ms a step, which is less than the noise of 0.6 ms",
    )
    found = [
        Finding(
            "exposed",
            "25.9 ms of each step are spent sending gradients.",
            25.9,
            "Send less: --parallel.compression powersgd:4, or `hvdtrain timeline whatif RUN`.",
        ),
        Finding("input", "The input pipeline is ahead by 2 batches.", None, "Nothing to do."),
    ]
    if costs:
        text = f"Rank {who} on node-{who // 8} is late by 12.3 ms in 93% of the steps: it waits for data."
        found.insert(1, Finding("straggler", text, 12.3, "Give it more loaders: --loader.workers 4."))
    carriers = [
        Carrier(
            f"gradients.{n}",
            [m.format(n) for m in _MODULES[n % 4 :]],
            26_214_400 >> (n % 3),
            24.0 - 2 * n,
            max(0.0, 11.0 - 3 * n),
        )
        for n in range(8)
    ]
    phases = parts({"negotiation": 9.4, "queue": 2.2, "fusion copies": 0.9, "transfer": 148.0})
    communication = Communication(phases, 158.2, 0.74, 3.1e8, 2.06, 2.9)
    return Analysis(
        title="20261120-154250-language_model",
        size=size,
        budget=budget(size),
        communication=communication if size > 1 else None,
        carriers=carriers if size > 1 else [],
        blame=blame,
        findings=found,
        warnings=["[1,0]<stderr>: One or more tensors were submitted to be reduced by subset of ranks"],
        notes=[
            "clocks are aligned to within 0.02 ms",
            "Horovod's Timeline of steps 10 to 20 was read; 1 event was cut off",
        ],
        memory=Memory("GPU", {"parameters": 1000.0, "buffers": 0.0, "activations and rest": 3000.5}),
        cost=Cost(2, 12.5, {"GPUs": 8.25}, {"CPUs": "RAPL is for root only"}, 31.25, 2.5),
        goodput=Goodput({"training": 8.5, "waiting for late ranks": 2.0, "start-up": 1.25, "restarts": 0.75}),
        efficiency=Efficiency(0.41, {"kernels below the peak": 0.38, "waiting for late ranks": 0.12, "rest": 0.09}),
        scaling=Scaling(2, 8, 0.93),
        over_time=over_time(),
    )


def over_time() -> OverTime:
    """190 moments of a run, with a start, a straggler and a change."""
    chance = random.Random(7)
    moments = []
    for n in range(190):
        took = {name: ms * chance.uniform(0.9, 1.1) for name, ms in _PARTS.items()}
        moments.append(Moment(2 * n + 1, 2 * n + 2, sum(took.values()), 350.0, took))
    marks = [Mark("start", 1, "the run starts"), Mark("straggler", 200, "rank 3 becomes a straggler")]
    return OverTime(moments, [*marks, Mark("change", 300, "steps take longer")])


def hostile() -> Analysis:
    """One whose every text would take the page over."""
    plain = replace(analysis(4), goodput=None, efficiency=None)
    taken: Analysis = _taken(plain)
    return replace(taken, communication=plain.communication)  # whose phases are a fixed set


def _taken(value: Any) -> Any:
    """The same, in which each text is `HOSTILE`, but those of fixed sets."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, (list, tuple)):
        return [_taken(each) for each in value]
    if isinstance(value, dict):
        return {_taken(key): _taken(each) for key, each in value.items()}
    if is_dataclass(value):
        fixed = {"source"} | ({"kind"} if isinstance(value, Mark) else set())
        free = {field.name for field in fields(value)} - fixed
        return replace(value, **{name: _taken(getattr(value, name)) for name in free})  # type: ignore[type-var]
    return value


def empty() -> Analysis:
    """A Timeline in which there was nothing."""
    blame = Blame("none", 0, [], [], {}, "the file holds no ticks", unknown=True)
    return Analysis("timeline.json", 0, None, None, [], blame, [])
