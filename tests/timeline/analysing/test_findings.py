"""Findings: said where the data say so and not elsewhere; every flag exists."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from hvdtrain.config.schema import Config
from hvdtrain.timeline.analyse import analyse
from hvdtrain.timeline.analysing import findings, findings_horovod
from hvdtrain.timeline.analysis import Analysis, Cause, Finding
from hvdtrain.timeline.columns import BucketFacts, RankSpans, RunTrace
from hvdtrain.timeline.telling.text import to_text
from tests.support.step_tables import Floats, noise, run_of, table_of
from tests.support.timelines import Turn, trace_of

SHAPE = (4, 200)


def _work(scale: float = 0.1) -> Floats:
    found: Floats = 20 + noise(np.random.default_rng(0), SHAPE, "gaussian", scale)
    return found


def _each(value: float, rank: int | None = None) -> Floats:
    found = np.zeros(SHAPE)
    found[slice(None) if rank is None else rank] = value
    return found


def _kinds(analysis: Analysis) -> set[str]:
    return {finding.kind for finding in analysis.findings}


def _causes(analysis: Analysis, rank: int) -> list[Cause]:
    return list(analysis.blame.causes[rank])


def test_a_run_without_trouble_has_none() -> None:
    quiet = {"more_ms": {"data": -0.05 * _work()}}  # no time for data at all
    analysis = analyse(run_of(table_of(_work(), exchange_ms=0.1, **quiet)))  # type: ignore[arg-type]
    assert _kinds(analysis) == set()
    assert "nothing stands out" in to_text(analysis)


@pytest.mark.parametrize("part", ["data", "copy", "forward", "backward", "optimizer"])
def test_the_part_that_takes_longer_is_the_cause(part: str) -> None:
    analysis = analyse(run_of(table_of(_work(), more_ms={part: _each(2.0, rank=1)})))
    assert analysis.blame.late == [1]
    first = _causes(analysis, 1)[0]
    assert first.name == part and first.ms == pytest.approx(2.0, rel=0.05)
    finding = next(f for f in analysis.findings if f.kind == "straggler")
    assert "rank 1 on host0" in finding.text and first.text in finding.text


def test_what_lies_beside_a_late_rank_is_told_of_it_alone() -> None:
    facts: dict[str, list[float | None]] = {
        "cpu_wait_us": [0.0, 100_000.0, 0.0, 0.0],
        "steal_us": [0.0, None, 0.0, 0.0],
        "gpu_clock_mhz": [1900.0, 1200.0, 1900.0, 1900.0],
        "gpu_temperature_c": [60.0, 88.0, 61.0, 60.0],
        "gpu_throttle": [0.0, float(0x40), 0.0, 0.0],
        "expert_share": [0.12, 0.3, 0.13, 0.12],
    }
    late = {"forward": _each(2.0, rank=1), "gc": _each(1.0, rank=1)}
    analysis = analyse(run_of(table_of(_work(), more_ms=late, facts=facts)))
    causes = {cause.name: cause for cause in _causes(analysis, 1)}
    assert set(causes) == {"forward", "gc", "cpu", "gpu clock", "gpu temperature", "gpu throttle", "experts"}
    assert causes["cpu"].ms == pytest.approx(2.0, rel=0.05)  # 100 ms in blocks of 50 steps
    assert causes["gc"].ms == pytest.approx(1.0)
    assert "1200 MHz" in causes["gpu clock"].text and causes["gpu clock"].ms is None


def test_a_rank_whose_sums_come_late_has_a_slow_link() -> None:
    skew = np.array([0.0, 0.0, 2.0, 0.0])
    analysis = analyse(run_of(table_of(_work(), skew_ms=skew)))
    assert analysis.blame.late == [2] and _causes(analysis, 2)[0].name == "sums"


def test_waiting_for_data_on_every_rank_is_told_with_its_flag() -> None:
    config = {"loader": {"workers": 2}}
    found = analyse(run_of(table_of(_work(), more_ms={"data": _each(10.0)}), config=config))
    finding = found.findings[0]
    assert finding.kind == "input" and "--loader.workers 4" in finding.advice
    assert finding.cost_ms == pytest.approx(11.0, rel=0.05)


def test_late_data_on_one_rank_is_that_ranks_affair() -> None:
    work = _work()
    found = analyse(run_of(table_of(work, more_ms={"data": _each(4.0, rank=0) - 0.05 * work})))
    assert "input" not in _kinds(found) and found.blame.late == [0]


@pytest.mark.parametrize(
    ("phase", "flag"),
    [("MPI_ALLREDUCE", "--parallel.compression auto"), ("NEGOTIATE_ALLREDUCE", "--parallel.bucket_mib 128")],
)
def test_exposed_communication_is_told_with_what_dominates_it(phase: str, flag: str) -> None:
    table = table_of(_work(), exchange_ms=6.0)
    turns = [Turn("g", float(t), {phase: 6000.0}) for t in table.ready_us.max(axis=0)[5:60]]
    found = analyse(run_of(table, horovod=[trace_of(turns)], config={"parallel": {"compression": "none"}}))
    finding = next(f for f in found.findings if f.kind == "exposed")
    assert finding.cost_ms == pytest.approx(6.0, rel=0.05)
    assert flag in finding.advice


def test_what_is_compressed_is_not_told_to_be() -> None:
    run = run_of(table_of(_work(), exchange_ms=6.0), config={"parallel": {"compression": "fp16", "bucket_mib": 8.0}})
    finding = next(f for f in analyse(run).findings if f.kind == "exposed")
    assert "compression" not in finding.advice and "--parallel.bucket_mib 2" in finding.advice


def test_where_nobody_asked_for_a_size_of_buckets_advice_goes_by_those_there_are() -> None:
    bucket = BucketFacts("gradients/0", ["w"], [[2 << 20]], "float32", 2 << 20)  # 8 MiB
    nothing = np.zeros(0, np.int32)
    spans = RankSpans(0, "a", [], nothing.astype(np.int16), nothing, nothing, np.zeros(0), np.zeros(0), {2: bucket})
    run = run_of(table_of(_work(), exchange_ms=6.0), spans=[spans], config={"parallel": {"bucket_mib": None}})
    finding = next(f for f in analyse(run).findings if f.kind == "exposed")
    assert "--parallel.bucket_mib 2" in finding.advice


def test_of_two_ranks_the_late_ones_data_is_told_once() -> None:
    work = _work()[:2]
    late = np.zeros_like(work)
    late[1] = 4.0
    found = analyse(run_of(table_of(work, more_ms={"data": late - 0.05 * work})))
    assert found.blame.late == [1] and "input" not in _kinds(found)


def test_evaluations_collections_and_cores_are_told() -> None:
    aside = np.zeros(SHAPE)
    aside[:, 9::10] = 60.0
    facts: dict[str, list[float | None]] = {"cpu_wait_us": [150_000.0] * 4}
    run = run_of(table_of(_work(), more_ms={"aside": aside, "gc": _each(1.5)}, facts=facts))
    assert {"aside", "gc", "cpu"} <= _kinds(analyse(run))


def test_stalls_and_pauses_are_told() -> None:
    work = _work()
    work[1, 90] += 9000.0
    stalled = [f"Horovod stalled on rank {rank} for more than 60 s, 2 times: a, b" for rank in (1, 3)]
    ended = "Horovod shut the job down for a stall (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
    found = analyse(run_of(table_of(work), warnings=[*stalled, ended]))
    assert {"stall", "pause"} <= _kinds(found)
    assert "straggler" not in _kinds(found)
    text = next(finding.text for finding in found.findings if finding.kind == "stall")
    assert text == f"{stalled[0]}; and on 1 more rank(s)"


def test_other_warnings_are_no_stalls() -> None:
    lacking = 'nothing is written for TensorBoard, which is not installed: pip install "hvdtrain[tensorboard]"'
    assert "stall" not in _kinds(analyse(run_of(table_of(_work()), warnings=[lacking, "NCCL warned: stalled"])))


def test_a_slow_bus_is_told_beside_what_the_link_can_do() -> None:
    table = table_of(_work(), exchange_ms=6.0)
    turns = [Turn("g", float(t), {"MPI_ALLREDUCE": 6000.0}, 6_000_000) for t in table.ready_us.max(axis=0)]
    trace = trace_of(turns)  # 1.5 GB/s
    fast, slow = [(80_000_000, 0.012)], [(80_000_000, 0.06)]  # 10 and 2 GB/s
    assert "bandwidth" in _kinds(analyse(run_of(table, horovod=[trace], link=fast)))
    assert "bandwidth" not in _kinds(analyse(run_of(table, horovod=[trace], link=slow)))


def _timeline(phases: dict[str, float], *, tensors: int = 4, ticks: bool = False) -> Analysis:
    turns = []
    for step in range(40):
        for i in range(tensors):
            begin = 1e5 * step + 1e5 * i / tensors
            said = {0: begin, 1: begin + 1.0} if ticks else {}
            turns.append(Turn(f"allreduce.t{i}.weight", begin, phases, 4000, said))
    return analyse(RunTrace(Path("t.json"), 2, horovod=[trace_of(turns)]))


def test_a_timeline_by_itself_is_told_by_what_fills_it() -> None:
    assert _kinds(_timeline({"MPI_ALLREDUCE": 20_000.0})) == {"transfer"}
    assert _kinds(_timeline({"NEGOTIATE_ALLREDUCE": 20_000.0, "MPI_ALLREDUCE": 10.0})) == {"negotiation"}
    assert _kinds(_timeline({"MPI_ALLREDUCE": 100.0})) == {"idle"}
    assert "cache" in _kinds(_timeline({"NEGOTIATE_ALLREDUCE": 5.0, "MPI_ALLREDUCE": 5000.0}, ticks=True))
    assert "small_tensors" in _kinds(_timeline({"MPI_ALLREDUCE": 900.0}, tensors=100))
    assert "fusion_copies" in _kinds(_timeline({"MEMCPY_IN_FUSION_BUFFER": 9000.0, "MPI_ALLREDUCE": 5000.0}))


def _options(cls: Any, prefix: str = "--") -> set[str]:
    found = set()
    for field in fields(cls):
        kind = get_type_hints(cls)[field.name]
        found |= _options(kind, f"{prefix}{field.name}.") if is_dataclass(kind) else {f"{prefix}{field.name}"}
    return found


def test_every_flag_that_is_advised_exists() -> None:
    text = "".join(Path(module.__file__).read_text() for module in (findings, findings_horovod))
    advised = set(re.findall(r"--[a-z_]+\.[a-z_]+", text))
    assert {"--loader.workers", "--parallel.compression"} <= advised <= _options(Config)


def test_findings_are_ordered_by_what_they_cost() -> None:
    found: list[Finding] = list(
        analyse(run_of(table_of(_work(), exchange_ms=3.0, more_ms={"data": _each(9)}))).findings
    )
    costs = [finding.cost_ms or 0.0 for finding in found]
    assert costs == sorted(costs, reverse=True) and len(costs) >= 2
