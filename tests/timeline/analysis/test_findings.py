"""Findings: said where the data say so and not elsewhere; every flag exists."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from hvdtrain.config.schema import Config
from hvdtrain.timeline.analysis import findings, findings_exchange, findings_ranks
from hvdtrain.timeline.analysis import inputs as facts
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, Cause, Finding
from hvdtrain.timeline.columns import BucketFacts, JournalSteps, RankSpans, RunTrace
from hvdtrain.timeline.report.terminal import to_text
from hvdtrain.timeline.verdicts import verdicts
from hvdtrain.timeline.wording import worst_straggler
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
    assert "findings: none" in to_text(analysis)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"late": 0, "graph_breaks": 0, "late_reasons": [], "break_reasons": []}, {}),
        (
            {"late": 2, "late_reasons": ["size"]},
            {"recompile": "torch.compile compiled 2 function(s) after step 1: size"},
        ),
        ({"graph_breaks": 1, "break_reasons": []}, {"graph_break": "torch.compile broke 1 graph(s)"}),
        ({"late": "damaged", "graph_breaks": None}, {}),
    ],
)
def test_late_compilations_and_graph_breaks_are_reported(counts: dict[str, Any], expected: dict[str, str]) -> None:
    run = replace(run_of(table_of(_work())), events={"compiled": {"event": "compiled", **counts}})
    found = {f.kind: f.text for f in analyse(run).findings if f.kind in ("recompile", "graph_break")}
    assert found == expected


@pytest.mark.parametrize("part", ["data", "copy", "forward", "backward", "optimizer"])
def test_the_part_that_takes_longer_is_the_cause(part: str) -> None:
    analysis = analyse(run_of(table_of(_work(), more_ms={part: _each(2.0, rank=1)})))
    assert analysis.blame.late == [1]
    first = _causes(analysis, 1)[0]
    assert first.name == part and first.ms == pytest.approx(2.0, rel=0.05)
    finding = next(f for f in analysis.findings if f.kind == "straggler")
    assert "rank 1 on host0" in finding.text and first.text in finding.text


def test_reasons_are_reported_of_the_late_rank_only() -> None:
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


def test_the_reason_of_a_slow_gpu_is_reported_if_others_lack_it() -> None:
    late = {"forward": _each(2.0, rank=1)}

    def told(*reasons: str | None) -> list[str]:
        facts: dict[str, list[Any]] = {"gpu_throttle": list(reasons)}
        causes = _causes(analyse(run_of(table_of(_work(), more_ms=late, facts=facts))), 1)
        return [cause.text for cause in causes if cause.name == "gpu throttle"]

    assert told(*["power cap"] * 4) == []
    assert told("", "power cap", "power cap, thermal, software", "power cap") == []
    assert told("", "", "thermal, hardware", None) == []
    for mine in ("thermal, hardware", "power cap, thermal, hardware"):
        assert told("power cap", mine, "power cap", None) == [f"its GPU throttled: {mine}"]


def test_facts_are_those_of_their_block_where_another_is_not_known() -> None:
    """A block without a step that all ranks know leaves its number out of the steps."""
    whole = table_of(_work(), more_ms={"forward": _each(2.0, rank=1)})
    keep = whole.block != 1
    table = replace(
        whole,
        facts=[{"cpu_wait_us": [0.0, 1e5 * number, 0.0, 0.0]} for number in range(4)],
        parts_us={name: values[:, keep] for name, values in whole.parts_us.items()},
        **{name: getattr(whole, name)[keep] for name in ("step", "block")},
        **{name: getattr(whole, name)[:, keep] for name in ("start_us", "ready_us", "released_us", "end_us")},
    )
    cpu = next(cause for cause in _causes(analyse(run_of(table)), 1) if cause.name == "cpu")
    assert cpu.ms == pytest.approx((0 + 200 + 300) / 150)


def test_cores_are_waited_for_in_the_steps_whose_facts_are_known() -> None:
    table = table_of(_work(), block=60)  # the last one has 20
    known = {"cpu_wait_us": [180_000.0] * 4}
    found = analyse(run_of(replace(table, facts=[known, known, {"cpu_wait_us": [None] * 4}, {}])))
    assert next(f for f in found.findings if f.kind == "cpu").cost_ms == pytest.approx(3.0)


def test_a_step_waits_for_cores_no_longer_than_it_takes() -> None:
    facts: dict[str, list[float | None]] = {"cpu_wait_us": [1e9] * 4}
    found = analyse(run_of(table_of(_work(), facts=facts)))
    assert found.budget is not None
    assert next(f for f in found.findings if f.kind == "cpu").cost_ms == found.budget.step_ms.value


def test_a_rank_whose_sums_come_late_has_a_slow_link() -> None:
    skew = np.array([0.0, 0.0, 2.0, 0.0])
    analysis = analyse(run_of(table_of(_work(), skew_ms=skew)))
    assert analysis.blame.late == [2] and _causes(analysis, 2)[0].name == "sums"


def test_waiting_for_data_on_every_rank_is_reported_with_its_option() -> None:
    config = {"loader": {"workers": 2}}
    found = analyse(run_of(table_of(_work(), more_ms={"data": _each(10.0)}), config=config))
    finding = found.findings[0]
    assert finding.kind == "input" and "--loader.workers 4" in finding.advice
    assert finding.cost_ms == pytest.approx(11.0, rel=0.05)


def test_late_data_on_one_rank_is_that_ranks_affair() -> None:
    work = _work()
    found = analyse(run_of(table_of(work, more_ms={"data": _each(4.0, rank=0) - 0.05 * work})))
    assert "input" not in _kinds(found) and found.blame.late == [0]


@pytest.mark.parametrize(("workers", "advised"), [(0, 1), (4, 8)])
def test_a_late_rank_that_waits_for_data_is_advised_more_workers(workers: int, advised: int) -> None:
    table = table_of(_work(), more_ms={"data": _each(4.0, rank=0)})
    found = analyse(run_of(table, config={"loader": {"workers": workers}}))
    finding = next(f for f in found.findings if f.kind == "straggler")
    assert re.findall(r"--loader.workers (\d+)", finding.advice) == [str(advised)]


@pytest.mark.parametrize(
    ("options", "advised"), [({}, True), ({"balance": "speed"}, False), ({"shard": "optimizer"}, False)]
)
def test_a_rank_that_computes_slowly_may_get_fewer_micro_batches(options: dict[str, str], advised: bool) -> None:
    run = run_of(table_of(_work(), more_ms={"forward": _each(4.0, rank=2)}), config={"parallel": options})
    finding = next(f for f in analyse(run).findings if f.kind == "straggler")
    assert ("--parallel.balance speed" in finding.advice) == advised


PIPELINE = {"parallel": {"pp": 2}, "train": {"global_batch": 16, "micro_batch": 2}}


@pytest.mark.parametrize("slow", [None, 0, 3])
def test_the_order_of_stages_makes_no_straggler(slow: int | None) -> None:
    """The first stage, ranks 0 and 1, is ready last. Of the ranks of a stage, one may be slow."""
    more = _each(0.0)
    more[[0, 1]] = 8.0
    if slow is not None:
        more[slow] += 3.0
    table = replace(table_of(_work(), more_ms={"backward": more}), stages=2)
    found = analyse(run_of(table, config=PIPELINE))
    assert found.blame.late == ([] if slow is None else [slow])
    assert all(row.cost_ms.value == pytest.approx(3.0, rel=0.1) for row in found.blame.ranks if row.rank == slow)
    assert analyse(run_of(replace(table, stages=1), config=PIPELINE)).blame.late, "without stages"


@pytest.mark.parametrize("part", ["activations", "gather"])
def test_ranks_that_wait_for_others_within_passes_are_no_stragglers(part: str) -> None:
    """Rank 2 computes 8 ms longer than rank 3, which waits for it and is ready with it; others wait a little less."""
    waits = _each(1.0) + _each(7.0) - _each(7.0, rank=2) + _each(1.0, rank=3)
    table = table_of(_work(), more_ms={part: waits, "forward": _each(8.0, rank=2)})
    found = analyse(run_of(table))
    assert found.blame.late == [2] and found.blame.ranks[0].cost_ms.value == pytest.approx(8.0, rel=0.1)
    assert _causes(found, 2)[0].name == "forward"
    text = next(f for f in found.findings if f.kind == "straggler").text
    assert "rank 2 on" in text and re.search(r"8\.[01]\d ms behind the others", text)
    (exposed,) = [f for f in found.findings if f.kind == "exposed"]
    assert exposed.cost_ms == pytest.approx(2.0 if part == "gather" else 1.0, rel=0.1), "as rank 2 waits"


@pytest.mark.parametrize(
    ("options", "measured", "name"),
    [({"tp": 2}, False, "one of ranks 2, 3"), ({"tp": 2, "cp": 2}, False, "one of ranks 0, 1, 2, 3"),
     ({"cp": 2}, False, "one of ranks 2, 3"), ({"cp": 2}, True, "rank 3"),
     ({"tp": 2, "cp": 2}, True, "one of ranks 2, 3"), ({"tp": 1, "ep": 4}, False, "one of ranks 0, 1, 2, 3"),
     ({"tp": 2, "ep": 4}, True, "one of ranks 0, 1, 2, 3"),
     ({"tp": 3}, False, "rank 3"), ({"tp": "2"}, False, "rank 3"), ({}, False, "rank 3")],
)  # fmt: skip
def test_where_waits_are_not_measured_a_group_has_the_slow_rank(
    options: dict[str, Any], measured: bool, name: str
) -> None:
    more = {"forward": _each(8.0, rank=2) + _each(8.5, rank=3), "activations": _each(0.5 * measured)}
    if name == "rank 3":
        more["forward"] = _each(8.5, rank=3)
    found = analyse(run_of(table_of(_work(), more_ms=more), config={"parallel": options}))
    (finding,) = [f for f in found.findings if f.kind == "straggler"]
    assert finding.text.startswith(f"{name} on ")
    who, cost, ranks = worst_straggler(found.blame)
    assert who.startswith(name) and ranks == ([3] if name == "rank 3" else [3, 2])
    assert finding.cost_ms == pytest.approx(8.5, rel=0.05) and "for all stragglers" not in finding.text
    assert float(cost.split()[0]) == pytest.approx(8.5, rel=0.05)
    assert f"stragglers (step stamps of 198 steps): {name}\n" in to_text(found)
    (text,) = [text for key, text in verdicts(found).items() if key.startswith("rank")]
    assert text.startswith(f"{name} on ")


def test_the_least_wait_of_a_pipeline_is_reported() -> None:
    """Two pipelines with four micro-batches each; 20% of the 20 ms."""
    (finding,) = [f for f in analyse(run_of(table_of(_work()), config=PIPELINE)).findings if f.kind == "pipeline"]
    assert "at least 20% of forward and backward with 4 micro-batches" in finding.text
    virtual = {**PIPELINE, "parallel": {"pp": 2, "virtual_stages": 3}}
    (finding,) = [f for f in analyse(run_of(table_of(_work()), config=virtual)).findings if f.kind == "pipeline"]
    assert "at least 8% of forward and backward with 4 micro-batches" in finding.text
    assert "--parallel.virtual_stages than 3" in str(finding.advice)
    assert "twice as many, up to 4% less time a sample; or --parallel.zero_bubble true: up to 5% less" in finding.advice
    later = {**PIPELINE, "parallel": {"pp": 2, "zero_bubble": True}}
    (finding,) = [f for f in analyse(run_of(table_of(_work()), config=later)).findings if f.kind == "pipeline"]
    assert "at least 8% of forward and backward" in finding.text and "zero_bubble" not in str(finding.advice)
    by_fsdp = {**PIPELINE, "parallel": {"pp": 2, "engine": "fsdp"}}
    (finding,) = [f for f in analyse(run_of(table_of(_work()), config=by_fsdp)).findings if f.kind == "pipeline"]
    assert "twice as many" in str(finding.advice)
    assert "zero_bubble" not in str(finding.advice) and "virtual_stages" not in str(finding.advice)
    compiled = {**PIPELINE, "train": {**PIPELINE["train"], "compile": True}}  # type: ignore[dict-item]
    (finding,) = [f for f in analyse(run_of(table_of(_work()), config=compiled)).findings if f.kind == "pipeline"]
    assert "zero_bubble" not in str(finding.advice)
    many = {**PIPELINE, "train": {"global_batch": 160, "micro_batch": 2}}
    for config in (many, {"parallel": {"pp": 1}}, {"parallel": {"pp": "2"}}):
        assert "pipeline" not in _kinds(analyse(run_of(table_of(_work()), config=config)))
    smallest = {**PIPELINE, "train": {"global_batch": 16, "micro_batch": 1}}
    (finding,) = [f for f in analyse(run_of(table_of(_work()), config=smallest)).findings if f.kind == "pipeline"]
    assert "more micro-batches: a larger --train.global_batch" in finding.advice
    unequal = table_of(_work(), more_ms={"activations": _each(6.0, rank=0)})
    advice = {}
    for batch in (16, 1600):
        config = {**PIPELINE, "train": {"global_batch": batch, "micro_batch": 2}}
        (finding,) = [f for f in analyse(run_of(unequal, config=config)).findings if f.kind == "pipeline"]
        advice[batch] = str(finding.advice)
    assert "twice as many" in advice[16] and advice[1600] == "find out what slows the stage that waits least"


@pytest.mark.parametrize(("tp", "noted"), [(1, False), (2, True)])
def test_a_note_says_where_the_exchange_of_divided_matrices_is(tp: int, noted: bool) -> None:
    notes = analyse(run_of(table_of(_work()), config={"parallel": {"tp": tp}})).notes
    assert any("--parallel.tp, which is not measured" in note for note in notes) == noted


@pytest.mark.parametrize(("steps", "told"), [(6, False), (60, True)])
def test_a_collection_of_the_garbage_of_few_steps_says_nothing(steps: int, told: bool) -> None:
    table = table_of(_work()[:, :steps], more_ms={"gc": _each(1.5)[:, :steps]})
    assert ("gc" in _kinds(analyse(run_of(table)))) == told


def test_the_waits_of_stages_are_reported() -> None:
    """Those of the first stage are long; the second one has the most work."""
    table = table_of(_work(), more_ms={"activations": _each(6.0, rank=0) + _each(6.0, rank=1) + _each(1.0)})
    (finding,) = [f for f in analyse(run_of(table, config=PIPELINE)).findings if f.kind == "pipeline"]
    assert finding.cost_ms == pytest.approx(4.0, rel=0.05) and "Stage" not in finding.text, "of an older version"
    table = replace(table, stages=2)
    (finding,) = [f for f in analyse(run_of(table, config=PIPELINE)).findings if f.kind == "pipeline"]
    assert "wait for each other for 4.0" in finding.text and "Stage 1 waits least, 1.0" in finding.text


@pytest.mark.parametrize("more", [0.0, 8.0])
def test_ranks_wait_for_the_one_with_the_most_tokens_of_its_experts(more: float) -> None:
    waits = _each(2.0 + more) - _each(more, rank=3)
    table = table_of(_work(), more_ms={"activations": waits, "forward": _each(more, rank=3)})
    (finding,) = [f for f in analyse(run_of(table, config={"parallel": {"ep": 4}})).findings if f.kind == "activations"]
    assert finding.cost_ms == pytest.approx(2.0 + 0.75 * more, rel=0.05)
    assert ("rank 3" in finding.text) == ("rank 3" in finding.advice) == ("waits least" in finding.text) == bool(more)


SHARES = {"event": "shares", "at_step": 100, "shares": [6, 6, 3, 6], "pass_s": [0.003, 0.003, 0.006, 0.003]}


def _by_speed(late_ms: float, event: dict[str, Any]) -> Analysis:
    """Rank 2 is much later until step 100, and by `late_ms` from then on."""
    more = _each(20.0, rank=2)
    more[2, 100:] = late_ms
    config = {"parallel": {"balance": "speed"}}
    return analyse(run_of(table_of(_work(), more_ms={"forward": more}), config=config, shares=[event]))


def test_shares_by_speed_are_reported_and_what_is_left_is_not_blamed() -> None:
    found = _by_speed(4.0, SHARES)
    assert not found.blame.late and "no rank costs more than 6" in found.blame.reason
    (finding,) = [f for f in found.findings if f.kind in ("straggler", "shares")]
    assert "6, 6, 3, 6 on ranks" in finding.text and "step 101; rank 2 takes 2.0 times as long" in finding.text


def test_a_rank_that_is_late_by_more_than_a_micro_batch_is_blamed_in_spite_of_shares() -> None:
    found = _by_speed(9.0, SHARES)
    assert found.blame.late == [2]
    assert found.blame.ranks[0].cost_ms.value == pytest.approx(9.0, rel=0.05), "since the shares follow speed"


@pytest.mark.parametrize(
    "wrong",
    [{"shares": None}, {"pass_s": [1, 2, 3]}, {"pass_s": [1, 2, 3, 0]}, {"at_step": "1"}, {"shares": ["1"] * 4}],
)
def test_an_invalid_event_of_shares_is_ignored(wrong: dict[str, Any]) -> None:
    assert "shares" not in _kinds(_by_speed(9.0, {**SHARES, **wrong}))


@pytest.mark.parametrize("pinned", ["auto", "off"])
def test_copying_to_the_device_is_not_waiting_for_data(pinned: str) -> None:
    table = table_of(_work(), more_ms={"copy": _each(10.0), "data": -0.05 * _work()})
    found = analyse(run_of(table, config={"loader": {"workers": 2, "pin_memory": pinned}}))
    assert "input" not in _kinds(found)
    finding = next(f for f in found.findings if f.kind == "copy")
    assert finding.cost_ms == pytest.approx(10.0, rel=0.05)
    assert "--loader.workers" not in finding.advice
    assert ("--loader.pin_memory auto" in finding.advice) == (pinned == "off")


def _exposed_by(phase: str, spans: list[RankSpans], size: float) -> Finding:
    table = table_of(_work(), exchange_ms=6.0)
    turns = [Turn("g", float(t), {phase: 6000.0}) for t in table.ready_us.max(axis=0)[5:60]]
    config = {"parallel": {"compression": "fp16", "bucket_mib": size}}
    found = analyse(run_of(table, horovod=[trace_of(turns)], spans=spans, config=config))
    return next(f for f in found.findings if f.kind == "exposed")


@pytest.mark.parametrize("phase", ["MPI_ALLREDUCE", "NEGOTIATE_ALLREDUCE", "QUEUE", "MEMCPY_IN_FUSION_BUFFER"])
@pytest.mark.parametrize("size", [0.25, 0.3, 1, 25.0, 200, 256, 1000])
def test_another_size_of_buckets_is_advised_than_that_in_use(size: float, phase: str) -> None:
    advice = _exposed_by(phase, [], size).advice
    assert advice
    for advised in map(float, re.findall(r"--parallel.bucket_mib ([\d.]+)", advice)):
        assert advised < size if "smaller" in advice else advised > size


def _spans(*mib: int) -> RankSpans:
    """A rank's, with buckets of these sizes."""
    buckets = {
        2 + i: BucketFacts(f"gradients/{i}", ["w"], [[size << 18]], "float32", size << 18) for i, size in enumerate(mib)
    }
    nothing = np.zeros(0, np.int32)
    return RankSpans(0, "a", [], nothing.astype(np.int16), nothing, nothing, np.zeros(0), np.zeros(0), buckets)


def test_one_bucket_is_not_to_be_made_fewer() -> None:
    """Advice depends on the actual buckets, where they are smaller than the limit."""
    assert "--parallel.bucket_mib 32" in _exposed_by("NEGOTIATE_ALLREDUCE", [_spans(8, 4)], 64.0).advice
    assert "bucket" not in _exposed_by("NEGOTIATE_ALLREDUCE", [_spans(8)], 64.0).advice
    assert "--parallel.bucket_mib 2" in _exposed_by("MPI_ALLREDUCE", [_spans(8)], 64.0).advice


@pytest.mark.parametrize(("exchange_ms", "cores"), [(5.0, True), (12.0, False)])
def test_cores_are_blamed_for_what_they_may_cost(exchange_ms: float, cores: bool) -> None:
    facts: dict[str, list[float | None]] = {"cpu_wait_us": [150_000.0] * 4}  # 3 ms a step
    found = analyse(run_of(table_of(_work(), exchange_ms=exchange_ms, facts=facts)))
    finding = next(f for f in found.findings if f.kind == "exposed")
    assert "cpu" in _kinds(found)
    assert ("waits for CPU cores" in finding.advice) == ("start fewer ranks" in finding.advice) == cores
    assert ("--parallel.compression auto" in finding.advice) == (not cores)


def test_cores_are_blamed_for_jitter_that_they_may_cost() -> None:
    work = _work()
    work[np.random.default_rng(1).integers(0, 4, 200), np.arange(200)] += 10.0
    for waited_us, cores in ((400_000.0, True), (100_000.0, False)):
        facts: dict[str, list[float | None]] = {"cpu_wait_us": [waited_us] * 4}
        found = analyse(run_of(table_of(work, facts=facts)))
        jitter = next(f for f in found.findings if f.kind == "jitter")
        assert "cpu" in _kinds(found)
        assert ("ranks wait for CPU cores" in jitter.advice) == ("start fewer ranks" in jitter.advice) == cores


def test_jitter_of_one_rank_is_not_reported_as_jitter_of_all() -> None:
    work = _work()[:2, :40]
    work[1, 3::5] += 15.0
    found = analyse(run_of(table_of(work)))
    assert not found.blame.late
    jitter = next(f for f in found.findings if f.kind == "jitter")
    assert "wait for rank 1" in jitter.text and "now another" not in jitter.text


@pytest.mark.parametrize(
    ("phase", "flag"),
    [("MPI_ALLREDUCE", "--parallel.compression auto"), ("NEGOTIATE_ALLREDUCE", "--parallel.bucket_mib 128")],
)
def test_exposed_communication_is_reported_with_its_main_part(phase: str, flag: str) -> None:
    table = table_of(_work(), exchange_ms=6.0)
    turns = [Turn("g", float(t), {phase: 6000.0}) for t in table.ready_us.max(axis=0)[5:60]]
    found = analyse(run_of(table, horovod=[trace_of(turns)], config={"parallel": {"compression": "none"}}))
    finding = next(f for f in found.findings if f.kind == "exposed")
    assert finding.cost_ms == pytest.approx(6.0, rel=0.05)
    assert flag in finding.advice


@pytest.mark.parametrize(
    ("exchange_ms", "options", "advised"),
    [
        (200.0, {}, True),
        (200.0, {"sync": "auto"}, True),
        (20.0, {}, False),
        (200.0, {"sync": "diloco:8"}, False),
        (200.0, {"engine": "ddp"}, False),
    ],
)
def test_rarer_exchanges_are_advised_where_most_of_a_step_is_an_exchange(
    exchange_ms: float, options: dict[str, str], advised: bool
) -> None:
    config = {"parallel": {"compression": "int8", "bucket_mib": 8.0, **options}}
    found = analyse(run_of(table_of(_work(), exchange_ms=exchange_ms), config=config))
    finding = next(f for f in found.findings if f.kind == "exposed")
    assert ("--sync auto" in finding.advice) == advised


def test_what_is_compressed_is_not_told_to_be() -> None:
    run = run_of(table_of(_work(), exchange_ms=6.0), config={"parallel": {"compression": "fp16", "bucket_mib": 8.0}})
    finding = next(f for f in analyse(run).findings if f.kind == "exposed")
    assert "compression" not in finding.advice and "--parallel.bucket_mib 2" in finding.advice


@pytest.mark.parametrize(
    ("options", "buckets"), [({"engine": "fsdp"}, False), ({"engine": "ddp"}, True), ({"shard": "optimizer"}, True)]
)
def test_advice_is_what_the_engine_supports(options: dict[str, str], buckets: bool) -> None:
    run = run_of(table_of(_work(), exchange_ms=6.0), config={"parallel": {"compression": "none", **options}})
    advice = next(f for f in analyse(run).findings if f.kind == "exposed").advice
    assert "--parallel.compression bf16" in advice and "auto" not in advice
    assert ("--parallel.bucket_mib" in advice) == buckets


def test_without_a_requested_bucket_size_advice_uses_the_actual_one() -> None:
    run = run_of(table_of(_work(), exchange_ms=6.0), spans=[_spans(8)], config={"parallel": {"bucket_mib": None}})
    finding = next(f for f in analyse(run).findings if f.kind == "exposed")
    assert "--parallel.bucket_mib 2" in finding.advice


def test_data_waits_of_the_late_rank_are_reported_once() -> None:
    work = _work()[:2]
    late = np.zeros_like(work)
    late[1] = 4.0
    found = analyse(run_of(table_of(work, more_ms={"data": late - 0.05 * work})))
    assert found.blame.late == [1] and "input" not in _kinds(found)


def test_evaluations_garbage_collections_and_cores_are_reported() -> None:
    aside = np.zeros(SHAPE)
    aside[:, 9::10] = 60.0
    facts: dict[str, list[float | None]] = {"cpu_wait_us": [150_000.0] * 4}
    run = run_of(table_of(_work(), more_ms={"aside": aside, "gc": _each(1.5)}, facts=facts))
    assert {"aside", "gc", "cpu"} <= _kinds(analyse(run))


@pytest.mark.parametrize(
    ("evaluation_s", "expected", "advice"),
    [
        (None, "evaluations and checkpoints take 22% of the time", "run them less often, or evaluate fewer samples"),
        (
            1.2,
            "evaluations take 22% of the time",
            "run them less often: --train.eval_every 111, 5.46 ms less per step, or eval",
        ),
        (0.0, "checkpoints take 22% of the time", "run them less often: --checkpoint.every 56"),
        (
            0.6,
            "evaluations take 11% of the time and checkpoints take 11%",
            "--train.eval_every 56 --checkpoint.every 29",
        ),
    ],
)
def test_evaluations_and_checkpoints_are_told_apart(evaluation_s: float | None, expected: str, advice: str) -> None:
    """Advice is never to do more of it."""
    aside = np.zeros(SHAPE)
    aside[:, 9::10] = 60.0
    table = table_of(_work(), more_ms={"aside": aside})
    nothing = np.zeros(SHAPE[1])
    journal = JournalSteps(np.arange(1, SHAPE[1] + 1), nothing + 20.0, {"forward": nothing}, nothing)
    config = {"train": {"eval_every": 10}, "checkpoint": {"every": 5}}
    run = run_of(table, config=config, journal=journal, evaluation_s=evaluation_s)
    finding = next(finding for finding in analyse(run).findings if finding.kind == "aside")
    assert finding.text.startswith(expected) and advice in finding.advice


def test_stalls_and_pauses_are_reported() -> None:
    work = _work()
    work[1, 90] += 9000.0
    stalled = [f"Horovod stalled on rank {rank} for more than 60 s, 2 times: a, b" for rank in (1, 3)]
    ended = "Horovod shut the job down for a stall (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
    found = analyse(run_of(table_of(work), warnings=[*stalled, ended]))
    assert {"stall", "pause"} <= _kinds(found)
    assert "straggler" not in _kinds(found)
    text = next(finding.text for finding in found.findings if finding.kind == "stall")
    assert text == f"{stalled[0]}; and on 1 more rank"


def test_other_warnings_are_no_stalls() -> None:
    lacking = 'nothing is written for TensorBoard, which is not installed: pip install "hvdtrain[tensorboard]"'
    assert "stall" not in _kinds(analyse(run_of(table_of(_work()), warnings=[lacking, "NCCL warned: stalled"])))


def _pauses(work: Floats) -> list[Finding]:
    return [finding for finding in analyse(run_of(table_of(work))).findings if finding.kind == "pause"]


def test_pauses_are_listed_by_rank_with_their_cost() -> None:
    work = _work()
    work[1, [30, 60, 90, 120]] += 10_000.0  # part of each in the step after it
    work[3, 150] += 1000.0
    often, once = _pauses(work)
    assert "rank 1 on host0 paused 4 times, about every 30 steps, 40.0 s in total" in often.text
    assert often.cost_ms == pytest.approx(40_000 / 198, rel=0.05)
    assert "rank 3 on host0 paused once: in step 151" in once.text


def test_pauses_without_a_period_are_listed_by_step() -> None:
    work = _work()
    work[1, [30, 50, 90, 180]] += 1000.0
    (found,) = _pauses(work)
    assert "rank 1 on host0 paused 4 times, in steps 31, 51, 91, 181, 4.00 s in total" in found.text


def test_a_pause_in_which_the_process_was_stopped_says_so() -> None:
    work = _work()
    work[2, 150] += 1000.0
    table = table_of(work, facts={"stopped_us": [0.0, 0.0, 990e3, 0.0]})
    (found,) = [finding for finding in analyse(run_of(table)).findings if finding.kind == "pause"]
    assert "its process was stopped for 990 ms" in found.text and "SIGSTOP" in found.advice


def test_a_rank_that_is_stopped_often_is_told_so() -> None:
    work = _work()
    work[2] += 20.0
    table = table_of(work, facts={"stopped_us": [0.0, 0.0, 50 * 19e3, 0.0]})
    (found,) = [finding for finding in analyse(run_of(table)).findings if finding.kind == "straggler"]
    causes = analyse(run_of(table)).blame.causes[2]
    assert "its process was stopped for 19.0 ms per step, others' for 0 ms" in [cause.text for cause in causes]
    assert causes[0].name == "stopped" and "its process was stopped for 19.0 ms" in found.text
    assert "find what stops it" in found.advice and "balance" not in found.advice
    for stopped_ms, first in ((9.0, "stopped"), (3.0, "backward")):  # backward takes 11 ms more
        table = table_of(work, facts={"stopped_us": [0.0, 0.0, 50 * 1e3 * stopped_ms, 0.0]})
        assert analyse(run_of(table)).blame.causes[2][0].name == first


def test_a_rank_that_is_stopped_seldom_is_told_without_statistics() -> None:
    work = _work()[:2]
    work[1, ::25] += 490.0
    table = table_of(work, facts={"stopped_us": [0.0, 2 * 490e3]})
    (found,) = [finding for finding in analyse(run_of(table)).findings if finding.kind == "stopped"]
    assert found.text == "the process of rank 1 on host0 was stopped for 19.6 ms per step"
    assert not [
        f for f in analyse(run_of(table_of(work, facts={"stopped_us": [0.0, 0.0]}))).findings if f.kind == "stopped"
    ]


def test_ranks_that_pause_at_once_are_one_pause() -> None:
    work = np.concatenate([_work(), _work()])
    work[4:7, 90] += 10_000.0
    (found,) = _pauses(work)
    assert "ranks 4, 5, 6 on host0 paused once: in step 91 they were 10.0 s later" in found.text
    assert found.cost_ms == pytest.approx(10_000 / 198, rel=0.05)


def test_many_ranks_that_pause_are_a_few_lines() -> None:
    work = np.repeat(_work(), 4, axis=0)
    for rank in range(8):
        work[rank, 20 + 9 * rank] += 1000.0
    assert ["more ranks paused" in finding.text for finding in _pauses(work)] == [False, False, False, True]


def test_a_rank_that_is_late_seldom_is_usually_ready_before_the_others() -> None:
    work = _work()
    work[3] -= 1.0
    work[3, ::5] += 20.0
    text = next(f.text for f in analyse(run_of(table_of(work))).findings if f.kind == "straggler")
    assert re.search(r"[\d.]+ ms ahead of the others", text)


def test_a_slow_bus_is_reported_with_the_speed_of_the_link() -> None:
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


def test_a_bare_timeline_is_explained_by_its_largest_parts() -> None:
    assert _kinds(_timeline({"MPI_ALLREDUCE": 20_000.0})) == {"transfer"}
    assert _kinds(_timeline({"NEGOTIATE_ALLREDUCE": 20_000.0, "MPI_ALLREDUCE": 10.0})) == {"negotiation"}
    assert _kinds(_timeline({"MPI_ALLREDUCE": 100.0})) == {"idle"}
    assert "cache" in _kinds(_timeline({"NEGOTIATE_ALLREDUCE": 5.0, "MPI_ALLREDUCE": 5000.0}, ticks=True))
    small = next(f for f in _timeline({"MPI_ALLREDUCE": 900.0}, tensors=100).findings if f.kind == "small_tensors")
    assert "FUSION_THRESHOLD" not in small.advice  # 128 MiB is what it is anyway
    assert "fusion_copies" in _kinds(_timeline({"MEMCPY_IN_FUSION_BUFFER": 9000.0, "MPI_ALLREDUCE": 5000.0}))


def _options(cls: Any, prefix: str = "--") -> set[str]:
    found = set()
    for field in fields(cls):
        kind = get_type_hints(cls)[field.name]
        found |= _options(kind, f"{prefix}{field.name}.") if is_dataclass(kind) else {f"{prefix}{field.name}"}
    return found


def test_every_flag_that_is_advised_exists() -> None:
    text = "".join(Path(module.__file__).read_text() for module in (facts, findings, findings_exchange, findings_ranks))
    advised = set(re.findall(r"--[a-z_]+\.[a-z_]+", text))
    assert {"--loader.workers", "--parallel.compression"} <= advised <= _options(Config)


def test_findings_are_ordered_by_what_they_cost() -> None:
    found: list[Finding] = list(
        analyse(run_of(table_of(_work(), exchange_ms=3.0, more_ms={"data": _each(9)}))).findings
    )
    costs = [finding.cost_ms or 0.0 for finding in found]
    assert costs == sorted(costs, reverse=True) and len(costs) >= 2
