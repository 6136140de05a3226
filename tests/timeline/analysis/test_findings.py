"""Findings: said where the data say so and not elsewhere; every flag exists."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdtrain.timeline
from hvdtrain.config.parse import make_parser
from hvdtrain.observe.past_journal import JournalStart
from hvdtrain.spans import EXCHANGE
from hvdtrain.task.base import load_task_function
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.analysis import Analysis, Cause, Finding, figures
from hvdtrain.timeline.analysis.inputs import Facts
from hvdtrain.timeline.columns import BucketFacts, JournalSteps, RankSpans, RunTrace, StepTable
from hvdtrain.timeline.report.form import to_bytes
from hvdtrain.timeline.report.terminal import to_text, verdicts
from hvdtrain.timeline.wording import worst_straggler
from tests.support.step_tables import Floats, columns_of, noise, run_of, table_of
from tests.support.timelines import Turn, spans_of, trace_of

SHAPE = (4, 200)


def _work(scale: float = 0.1) -> Floats:
    return 20 + noise(np.random.default_rng(0), SHAPE, "gaussian", scale)


def _each(value: float, rank: int | None = None) -> Floats:
    found = np.zeros(SHAPE)
    found[slice(None) if rank is None else rank] = value
    return found


def _analysed(
    work: Floats | None = None,
    *,
    config: Any = None,
    facts: Any = None,
    exchange_ms: float = 1.0,
    run: Any = None,
    **more_ms: Floats,
) -> Analysis:
    """A run of `work`, and of `more_ms` by part."""
    table = table_of(_work() if work is None else work, exchange_ms=exchange_ms, facts=facts, more_ms=more_ms)
    return analyse(run_of(table, config=config or {}, **(run or {})))


def _of(analysis: Analysis, kind: str) -> list[Finding]:
    return [finding for finding in analysis.findings if finding.kind == kind]


def _one(analysis: Analysis, kind: str) -> Finding:
    (found,) = _of(analysis, kind)
    return found


def _kinds(analysis: Analysis) -> set[str]:
    return {finding.kind for finding in analysis.findings}


def _causes(analysis: Analysis, rank: int) -> list[Cause]:
    return list(analysis.blame.causes[rank])


def test_a_run_without_trouble_has_none() -> None:
    analysis = _analysed(exchange_ms=0.1, data=-0.05 * _work())  # no time for data at all
    assert _kinds(analysis) == set()
    assert "findings: none" in to_text(analysis)


@pytest.mark.parametrize("part", ["data", "copy", "forward", "backward", "optimizer"])
def test_the_part_that_takes_longer_is_the_cause(part: str) -> None:
    analysis = _analysed(**{part: _each(2.0, rank=1)})
    assert analysis.blame.late == [1]
    first = _causes(analysis, 1)[0]
    assert first.name == part and first.ms == pytest.approx(2.0, rel=0.05)
    text = _one(analysis, "straggler").text
    assert "rank 1 on host0" in text and first.text in text


def test_reasons_are_reported_of_the_late_rank_only() -> None:
    facts = {
        "cpu_wait_us": [0.0, 100_000.0, 0.0, 0.0],
        "steal_us": [0.0, None, 0.0, 0.0],
        "gpu_clock_mhz": [1900.0, 1200.0, 1900.0, 1900.0],
        "gpu_temperature_c": [60.0, 88.0, 61.0, 60.0],
        "gpu_throttle": [0.0, float(0x40), 0.0, 0.0],
        "expert_share": [0.12, 0.3, 0.13, 0.12],
    }
    analysis = _analysed(facts=facts, forward=_each(2.0, rank=1), gc=_each(1.0, rank=1))
    causes = {cause.name: cause for cause in _causes(analysis, 1)}
    assert set(causes) == {"forward", "gc", "cpu", "gpu clock", "gpu temperature", "gpu throttle", "experts"}
    assert causes["cpu"].ms == pytest.approx(2.0, rel=0.05)  # 100 ms in blocks of 50 steps
    assert causes["gc"].ms == pytest.approx(1.0)
    assert "1200 MHz" in causes["gpu clock"].text and causes["gpu clock"].ms is None


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"ranks": 8, "threads": 1}, ["this job itself runs 8 threads on 2 cores: start fewer ranks"]),
        ({"ranks": 2, "threads": 4}, ["8 threads on 2 cores: start fewer ranks, or reduce OMP_NUM_THREADS"]),
        ({"ranks": 1, "threads": 4}, ["itself runs 4 threads on 2 cores: reduce OMP_NUM_THREADS"]),
        ({"ranks": 2, "threads": 1}, ["stop other programs there, or start fewer ranks"]),
        ({"ranks": "8", "threads": 1}, ["stop other programs"]),  # a damaged journal
    ],
)
def test_who_shares_the_cores_that_ranks_wait_for(host: dict[str, Any], words: list[str]) -> None:
    """Also in a run that is too short for a prediction."""
    start = SimpleNamespace(started={"machine": {"busiest_host": {"cores": 2, **host}}})
    run: Any = SimpleNamespace(start=start, config={})
    nothing: Any = None
    found = Facts(run, None, None, nothing, None).for_cores()
    assert all(word in found for word in words)


@pytest.mark.parametrize(
    ("reasons", "reported"),
    [
        (["power cap"] * 4, None),
        (["", "power cap", "power cap, thermal, software", "power cap"], None),
        (["", "", "thermal, hardware", None], None),
        (["power cap", "thermal, hardware", "power cap", None], "thermal, hardware"),
        (["power cap", "power cap, thermal, hardware", "power cap", None], "power cap, thermal, hardware"),
    ],
)
def test_the_reason_of_a_slow_gpu_is_reported_if_others_lack_it(reasons: list[Any], reported: str | None) -> None:
    causes = _causes(_analysed(facts={"gpu_throttle": reasons}, forward=_each(2.0, rank=1)), 1)
    texts = [cause.text.partition(": ")[2] for cause in causes if cause.name == "gpu throttle"]
    assert texts == ([reported] if reported else [])


def test_facts_are_those_of_their_block_where_another_is_not_known() -> None:
    """A block without a step that all ranks know leaves its number out of the steps."""
    whole = table_of(_work(), more_ms={"forward": _each(2.0, rank=1)})
    facts: list[Any] = [{"cpu_wait_us": [0.0, 1e5 * number, 0.0, 0.0]} for number in range(4)]
    table = replace(columns_of(whole, whole.block != 1), facts=facts)
    cpu = next(cause for cause in _causes(analyse(run_of(table)), 1) if cause.name == "cpu")
    assert cpu.ms == pytest.approx((0 + 200 + 300) / 150)


def test_cores_are_waited_for_in_the_steps_whose_facts_are_known_and_no_longer_than_these_take() -> None:
    table = table_of(_work(), block=60)  # the last one has 20
    known: dict[str, Any] = {"cpu_wait_us": [180_000.0] * 4}
    found = analyse(run_of(replace(table, facts=[known, known, {"cpu_wait_us": [None] * 4}, {}])))
    assert _one(found, "cpu").cost_ms == pytest.approx(3.0)
    start_up: dict[str, Any] = {"cpu_wait_us": [9e6] * 4}
    later = analyse(run_of(replace(table, facts=[start_up, known, known, {"cpu_wait_us": [60_000.0] * 4}])))
    assert _one(later, "cpu").cost_ms == pytest.approx(3.0), "not those of the start-up"
    assert to_bytes(later), "JSON has no numbers of numpy"
    most = _analysed(facts={"cpu_wait_us": [1e9] * 4})
    assert _one(most, "cpu").cost_ms == most.budget.step_ms.value


def test_a_rank_whose_sums_come_late_has_a_slow_link() -> None:
    analysis = analyse(run_of(table_of(_work(), skew_ms=np.array([0.0, 0.0, 2.0, 0.0]))))
    assert analysis.blame.late == [2] and _causes(analysis, 2)[0].name == "sums"


@pytest.mark.parametrize(
    ("config", "part", "ms", "rank", "kind", "advised"),
    [
        ({"loader": {"workers": 2}}, "data", 11.0, None, "input", ["--loader.workers 4"]),
        ({"loader": {"workers": 0}}, "data", 5.0, 0, "straggler", ["--loader.workers 1"]),
        ({"loader": {"workers": 4}}, "data", 5.0, 0, "straggler", ["--loader.workers 8"]),
        ({"loader": {"workers": 2, "pin_memory": "auto"}}, "copy", 10.0, None, "copy", []),
        ({"loader": {"workers": 2, "pin_memory": "off"}}, "copy", 10.0, None, "copy", ["--loader.pin_memory auto"]),
        ({}, "forward", 4.0, 2, "straggler", ["--parallel.balance speed"]),
        ({"parallel": {"balance": "speed"}}, "forward", 4.0, 2, "straggler", []),
        ({"parallel": {"shard": "optimizer"}}, "forward", 4.0, 2, "straggler", []),
    ],
)
def test_what_takes_longer_is_reported_with_the_option_that_the_run_may_change(
    config: dict[str, Any], part: str, ms: float, rank: int | None, kind: str, advised: list[str]
) -> None:
    """Work takes 20 ms, of these data 1."""
    more = {"data": -0.05 * _work()}
    more[part] = more.get(part, 0.0) + _each(ms, rank)
    found = _analysed(config=config, **more)
    finding = _one(found, kind)
    assert finding.cost_ms == pytest.approx(ms, rel=0.1) and (kind == "input") == ("input" in _kinds(found))
    assert re.findall(r"--[\w.]+ [\w.]+", finding.advice) == advised


def _pipeline(parallel: Any = None, train: Any = None) -> dict[str, Any]:
    """Options of two pipelines with four micro-batches each."""
    return {"parallel": {"pp": 2, **(parallel or {})}, "train": {"global_batch": 16, "micro_batch": 2, **(train or {})}}


@pytest.mark.parametrize("slow", [None, 0, 3])
def test_the_order_of_stages_makes_no_straggler(slow: int | None) -> None:
    """The first stage, ranks 0 and 1, is ready last. Of the ranks of a stage, one may be slow."""
    more = _each(0.0)
    more[[0, 1]] = 8.0
    if slow is not None:
        more[slow] += 3.0
    table = replace(table_of(_work(), more_ms={"backward": more}), stages=2)
    found = analyse(run_of(table, config=_pipeline()))
    assert found.blame.late == ([] if slow is None else [slow])
    assert all(row.cost_ms.value == pytest.approx(3.0, rel=0.1) for row in found.blame.ranks if row.rank == slow)
    assert analyse(run_of(replace(table, stages=1), config=_pipeline())).blame.late, "without stages"


@pytest.mark.parametrize("part", ["activations", "gather"])
def test_ranks_that_wait_for_others_within_passes_are_no_stragglers(part: str) -> None:
    """Rank 2 computes 8 ms longer than rank 3, which waits for it and is ready with it; others wait a little less."""
    waits = _each(1.0) + _each(7.0) - _each(7.0, rank=2) + _each(1.0, rank=3)
    found = _analysed(**{part: waits, "forward": _each(8.0, rank=2)})
    assert found.blame.late == [2] and found.blame.ranks[0].cost_ms.value == pytest.approx(8.0, rel=0.1)
    assert _causes(found, 2)[0].name == "forward"
    text = _one(found, "straggler").text
    assert "rank 2 on" in text and re.search(r"8\.[01]\d ms behind the others", text)
    as_rank_2_waits = 2.0 if part == "gather" else 1.0
    assert _one(found, "exposed").cost_ms == pytest.approx(as_rank_2_waits, rel=0.1)


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
    alone = name == "rank 3"
    forward = _each(8.5, rank=3) + (0.0 if alone else _each(8.0, rank=2))
    found = _analysed(config={"parallel": options}, forward=forward, activations=_each(0.5 * measured))
    finding = _one(found, "straggler")
    who, cost, ranks = worst_straggler(found.blame)
    assert ranks == ([3] if alone else [3, 2])
    assert finding.cost_ms == pytest.approx(8.5, rel=0.05) and "for all stragglers" not in finding.text
    assert float(cost.split()[0]) == pytest.approx(8.5, rel=0.05)
    assert f": {name}\n" in to_text(found)
    (verdict,) = [text for key, text in verdicts(found).items() if key.startswith("rank")]
    assert all(text.startswith(f"{name} on ") for text in (finding.text, verdict)) and who.startswith(name)


@pytest.mark.parametrize(
    ("parallel", "train", "percents", "advised"),
    [
        ({}, {}, [20, 10], ["micro_batch", "global_batch", "virtual_stages"]),
        ({"virtual_stages": 3}, {}, [8, 4], ["micro_batch", "global_batch", "virtual_stages"]),
        ({"engine": "fsdp"}, {}, [20, 10], ["micro_batch", "global_batch"]),
        ({}, {"micro_batch": 1}, [11, 6], ["global_batch", "virtual_stages"]),
    ],
)
def test_the_least_wait_of_a_pipeline_is_reported_with_what_makes_it_shorter(
    parallel: dict[str, Any], train: dict[str, Any], percents: list[int], advised: list[str]
) -> None:
    finding = _one(_analysed(config=_pipeline(parallel, train)), "pipeline")
    assert re.findall(r"(\d+)%", finding.text + finding.advice) == [*map(str, percents)]
    assert re.findall(r"--\w+\.(\w+)", finding.advice) == advised


@pytest.mark.parametrize("config", [_pipeline(train={"global_batch": 160}), *map(_pipeline, ({"pp": 1}, {"pp": "2"}))])
def test_without_stages_or_with_many_micro_batches_no_pipeline_is_reported(config: dict[str, Any]) -> None:
    assert "pipeline" not in _kinds(_analysed(config=config))


@pytest.mark.parametrize(("batch", "said"), [(16, "twice as many"), (1600, "slows the stage that waits least")])
def test_more_micro_batches_are_advised_where_they_help(batch: int, said: str) -> None:
    found = _analysed(config=_pipeline(train={"global_batch": batch}), activations=_each(6.0, rank=0))
    assert said in _one(found, "pipeline").advice


@pytest.mark.parametrize(("steps", "reported"), [(6, False), (60, True)])
def test_a_collection_of_the_garbage_of_few_steps_says_nothing(steps: int, reported: bool) -> None:
    found = _analysed(_work()[:, :steps], gc=_each(1.5)[:, :steps])
    assert ("gc" in _kinds(found)) == reported


def test_the_waits_of_stages_are_reported() -> None:
    """Those of the first stage are long; the second one has the most work."""
    table = table_of(_work(), more_ms={"activations": _each(6.0, rank=0) + _each(6.0, rank=1) + _each(1.0)})
    finding = _one(analyse(run_of(replace(table, stages=2), config=_pipeline())), "pipeline")
    assert finding.cost_ms == pytest.approx(4.0, rel=0.05)
    assert "wait for each other for 4.0" in finding.text and "Stage 1 waits least, 1.0" in finding.text
    assert "the most work, or is slow" in finding.text


@pytest.mark.parametrize("more", [0.0, 8.0])
def test_ranks_wait_for_the_one_with_the_most_tokens_of_its_experts(more: float) -> None:
    waits = _each(2.0 + more) - _each(more, rank=3)
    found = _analysed(config={"parallel": {"ep": 4}}, activations=waits, forward=_each(more, rank=3))
    finding = _one(found, "activations")
    assert finding.cost_ms == pytest.approx(2.0 + 0.75 * more, rel=0.05)
    assert ("rank 3" in finding.text) == ("rank 3" in finding.advice) == bool(more)


SHARES = {"event": "shares", "at_step": 100, "shares": [6, 6, 3, 6], "pass_s": [0.003, 0.003, 0.006, 0.003]}


def _by_speed(late_ms: float, event: dict[str, Any]) -> Analysis:
    """Rank 2 is much later until step 100, and by `late_ms` from then on."""
    more = _each(20.0, rank=2)
    more[2, 100:] = late_ms
    run = {"start": JournalStart({}, events=[event])}
    return _analysed(config={"parallel": {"balance": "speed"}}, run=run, forward=more)


def test_shares_by_speed_are_reported_and_what_is_left_is_not_blamed() -> None:
    found = _by_speed(4.0, SHARES)
    assert not found.blame.late and "no rank costs more than 6" in found.blame.reason
    text = _one(found, "shares").text
    assert not _of(found, "straggler") and "6, 6, 3, 6" in text and "step 101; rank 2 takes 2.0 times" in text


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


def _exposed(exchange_ms: float = 6.0, *, phase: str = "", spans: list[RankSpans] | None = None, **options: Any) -> Any:
    """The finding of a run whose exchange, while Horovod's Timeline is written, is one phase."""
    table = table_of(_work(), exchange_ms=exchange_ms)
    turns = [Turn("g", float(t), {phase: 6000.0}) for t in table.ready_us.max(axis=0)[5:60] if phase]
    horovod = [trace_of(turns)] if turns else []
    return _one(analyse(run_of(table, horovod=horovod, spans=spans or [], config={"parallel": options})), "exposed")


@pytest.mark.parametrize("phase", ["MPI_ALLREDUCE", "NEGOTIATE_ALLREDUCE", "QUEUE", "MEMCPY_IN_FUSION_BUFFER"])
@pytest.mark.parametrize("size", [0.25, 0.3, 1, 25.0, 200, 256, 1000])
def test_another_size_of_buckets_is_advised_than_that_in_use(size: float, phase: str) -> None:
    advice = _exposed(phase=phase, compression="fp16", bucket_mib=size).advice
    assert advice
    for advised in map(float, re.findall(r"--parallel.bucket_mib ([\d.]+)", advice)):
        assert advised < size if "smaller" in advice else advised > size


def _spans(*mib: int) -> RankSpans:
    """A rank's, with buckets of these sizes."""
    facts = [BucketFacts(f"gradients/{i}", ["w"], [[n << 18]], "float32", n << 18) for i, n in enumerate(mib)]
    return spans_of([], facts=dict(enumerate(facts, EXCHANGE)))


@pytest.mark.parametrize(("exchange_ms", "cores"), [(5.0, True), (12.0, False)])
def test_cores_are_blamed_for_what_they_may_cost(exchange_ms: float, cores: bool) -> None:
    found = _analysed(exchange_ms=exchange_ms, facts={"cpu_wait_us": [150_000.0] * 4})  # 3 ms a step
    advice = _one(found, "exposed").advice
    assert "cpu" in _kinds(found)
    assert ("CPU cores" in advice) == ("start fewer ranks" in advice) == cores
    assert ("--parallel.compression auto" in advice) == (not cores)


def test_jitter_of_one_rank_is_not_reported_as_jitter_of_all() -> None:
    work = _work()[:2, :40]
    work[1, 3::5] += 15.0
    found = _analysed(work)
    text = _one(found, "jitter").text
    assert not found.blame.late and "wait for rank 1" in text and "different ranks" not in text


COMPRESSED = {"compression": "int8", "bucket_mib": 8.0}
PLAIN = {"compression": "none"}


@pytest.mark.parametrize(
    ("exchange_ms", "phase", "buckets", "options", "advised"),
    [
        (6.0, "MPI_ALLREDUCE", [], PLAIN, ["--parallel.compression auto", "--parallel.bucket_mib 8"]),
        (6.0, "NEGOTIATE_ALLREDUCE", [], PLAIN, ["--parallel.bucket_mib 128"]),
        (6.0, "NEGOTIATE_ALLREDUCE", [8, 4], {**COMPRESSED, "bucket_mib": 64.0}, ["--parallel.bucket_mib 32"]),
        (6.0, "NEGOTIATE_ALLREDUCE", [8], {**COMPRESSED, "bucket_mib": 64.0}, []),  # one is not to be made fewer
        (6.0, "MPI_ALLREDUCE", [8], {**COMPRESSED, "bucket_mib": 64.0}, ["--parallel.bucket_mib 2"]),
        (6.0, "MPI_ALLREDUCE", [8], {**COMPRESSED, "bucket_mib": None}, ["--parallel.bucket_mib 2"]),
        (6.0, "", [], {**PLAIN, "engine": "fsdp"}, ["--parallel.compression bf16"]),
        (6.0, "", [], {**PLAIN, "engine": "ddp"}, ["--parallel.compression bf16", "--parallel.bucket_mib 8"]),
        (6.0, "", [], {**PLAIN, "shard": "optimizer"}, ["--parallel.compression bf16", "--parallel.bucket_mib 8"]),
        (20.0, "", [], COMPRESSED, ["--parallel.bucket_mib 2"]),
        (
            200.0,
            "",
            [],
            COMPRESSED,
            ["--parallel.bucket_mib 2", "--sync diloco:32", "--workers 2"],
        ),  # an exchange is most of a step
        (200.0, "", [], {**COMPRESSED, "sync": "diloco:8"}, ["--parallel.bucket_mib 2"]),
        (200.0, "", [], {**COMPRESSED, "engine": "ddp"}, ["--parallel.bucket_mib 2"]),
    ],
)
def test_an_exposed_exchange_is_reported_with_what_the_run_lacks_and_its_engine_supports(
    exchange_ms: float, phase: str, buckets: list[int], options: dict[str, Any], advised: list[str]
) -> None:
    finding = _exposed(exchange_ms, phase=phase, spans=[_spans(*buckets)] if buckets else [], **options)
    assert finding.cost_ms == pytest.approx(exchange_ms, rel=0.05)
    assert re.findall(r"--[\w.]+ [\w.:]+", finding.advice) == advised


@pytest.mark.parametrize(
    ("evaluation_s", "expected", "advice"),
    [
        (None, "evaluations and checkpoints take 22%", "often, or evaluate fewer samples"),
        (1.2, "evaluations take 22%", "--train.eval_every 111, 5.46 ms less per step, or evaluate"),
        (0.0, "checkpoints take 22%", "--checkpoint.every 56"),
        (0.6, "evaluations take 11% .* checkpoints take 11%", "--train.eval_every 56 --checkpoint.every 29"),
    ],
)
def test_evaluations_and_checkpoints_are_told_apart(evaluation_s: float | None, expected: str, advice: str) -> None:
    """Before every tenth step they take 60 ms. Advice is never to do more of it."""
    nothing, aside = np.zeros(SHAPE[1]), np.zeros(SHAPE)
    aside[:, 9::10] = 60.0
    journal = JournalSteps(np.arange(1, SHAPE[1] + 1), nothing + 20.0, {"forward": nothing}, nothing)
    config = {"train": {"eval_every": 10}, "checkpoint": {"every": 5}}
    seconds = {0: 9.0, 9: evaluation_s, SHAPE[1]: 9.0}  # before the first step, between steps, after the last
    events = [{"event": "evaluation", "at_step": at, "seconds": value} for at, value in seconds.items()]
    start = JournalStart({}, first_step=1, last_step=SHAPE[1], events=events)
    finding = _one(_analysed(config=config, aside=aside, run={"journal": journal, "start": start}), "aside")
    assert re.match(expected, finding.text) and advice in finding.advice


def test_a_rank_with_wrong_bits_is_named() -> None:
    events = [
        {"event": "wrong_rank", "at_step": at, "rank": rank, "what": "gradient", "host": "b", "cores": "0,1"}
        for at, rank in ((12, 3), (24, None), (36, 3))
    ]
    finding = _one(_analysed(run={"start": JournalStart({}, first_step=1, last_step=99, events=events)}), "wrong_bits")
    assert finding.text == "rank 3 (host b, cores 0,1) had wrong bits 2 times, last at step 36"


def test_stalls_and_pauses_are_reported_and_no_other_warning_is_a_stall() -> None:
    work = _work()
    work[1, 90] += 9000.0
    stalled = [f"Horovod stalled on rank {rank} for more than 60 s, 2 times: a, b" for rank in (1, 3)]
    others = ["Horovod shut the job down for a stall (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)", "NCCL warned: stalled"]
    found = _analysed(work, run={"warnings": [*stalled, *others]})
    assert "pause" in _kinds(found) and "straggler" not in _kinds(found)
    assert re.match(rf"{stalled[0]}.*\b1 more rank$", _one(found, "stall").text)
    assert "stall" not in _kinds(_analysed(run={"warnings": others}))


def _pauses(work: Floats, **facts: list[float]) -> list[Finding]:
    return _of(_analysed(work, facts=facts), "pause")


def test_pauses_are_listed_by_rank_with_their_cost() -> None:
    work = _work()
    work[1, [30, 60, 90, 120]] += 10_000.0  # part of each in the step after it
    work[2, [30, 50, 90, 180]] += 2000.0
    work[3, 150] += 1000.0
    often, irregular, once = _pauses(work)
    assert "rank 1 on host0 paused 4 times, about every 30 steps, 40.0 s" in often.text
    assert often.cost_ms == pytest.approx(40_000 / 198, rel=0.05)
    assert "rank 2 on host0 paused 4 times, in steps 31, 51, 91, 181, 8.00 s" in irregular.text
    assert "rank 3 on host0 paused once: in step 151" in once.text


def test_a_pause_in_which_the_process_was_stopped_says_so() -> None:
    work = _work()
    work[2, 150] += 1000.0
    (found,) = _pauses(work, stopped_us=[0.0, 0.0, 990e3, 0.0])
    assert "stopped for 990 ms" in found.text and "SIGSTOP" in found.advice


def test_ranks_that_pause_at_once_are_one_pause() -> None:
    work = np.concatenate([_work(), _work()])
    work[4:7, 90] += 10_000.0
    (found,) = _pauses(work)
    assert "ranks 4, 5, 6 on host0 paused once: in step 91 they were 10.0 s later" in found.text
    assert found.cost_ms == pytest.approx(10_000 / 198, rel=0.05)


@pytest.mark.parametrize(("stopped_ms", "first"), [(19.0, "stopped"), (9.0, "stopped"), (3.0, "backward")])
def test_a_rank_that_is_stopped_often_is_late_by_it(stopped_ms: float, first: str) -> None:
    """Its backward takes 11 ms more."""
    work = _work()
    work[2] += 20.0
    found = _analysed(work, facts={"stopped_us": [0.0, 0.0, 50 * 1e3 * stopped_ms, 0.0]})
    finding, cause = _one(found, "straggler"), _causes(found, 2)[0]
    assert cause.name == first and cause.text in finding.text and "SIGSTOP" in finding.advice
    if first == "stopped":
        assert f"stopped for {stopped_ms:.3g}" in cause.text and "balance" not in finding.advice


@pytest.mark.parametrize("ranks", [2, 8])
def test_advice_is_for_what_explains_most_of_a_lateness(ranks: int) -> None:
    """A late rank has the sums late, too; its link is not the reason."""
    work, more, skew = 100 + noise(np.random.default_rng(0), (ranks, 200), "gaussian", 1.0), {}, np.zeros(ranks)
    skew[1] = 2.0
    for name, ms, advised in (("forward", 10.0, False), ("forward", 2.0, True), ("data", 3.0, True)):
        more[name] = np.zeros_like(work)
        more[name][1] = ms
        found = analyse(run_of(table_of(work, skew_ms=skew, more_ms=more)))
        assert any("do not add up" in note for note in found.notes) == (len(found.findings) > 1)
        advice = _one(found, "straggler").advice
        assert ("link" in advice) == advised, (name, ms, advice)
        more[name][:] = 0.0


@pytest.mark.parametrize("part", ["data", "gc"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_part_shows_that_a_rank_is_late_where_the_whole_may_be_chance(ranks: int, part: str) -> None:
    for seed in range(3):
        generator = np.random.default_rng(seed)
        work, more = (
            200 + noise(generator, (ranks, 80), "lasting", 30.0),
            noise(generator, (ranks, 80), "gaussian", 0.5),
        )
        quiet = analyse(run_of(table_of(work, more_ms={part: np.abs(more)})))
        more[1] += 23.0
        late = work.copy()
        late[1] += 23.0 * (part == "gc")  # which is within the others
        found = analyse(run_of(table_of(late, more_ms={part: np.abs(more)})))
        assert found.blame.late == [1] and not quiet.blame.late, (seed, found.blame.reason)
        assert found.blame.causes[1][0].name == part
        slower = work.copy()
        slower[1] += 23.0
        truth = float((slower.max(axis=0) - work.max(axis=0)).mean())
        assert found.blame.ranks[0].cost_ms.value == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize(
    ("waited_ms", "options", "said"),
    [(300.0, {}, "CPU cores"), (1.0, {}, "longer run"), (1.0, {"compile": True}, "torch.compile")],
)
def test_a_slow_start_is_explained_by_what_was_measured(waited_ms: float, options: dict[str, bool], said: str) -> None:
    work = _work()
    work[:, :9] += 300.0
    table = table_of(work, block=10, facts={"cpu_wait_us": [9e3 * waited_ms] * 4})
    journal = JournalSteps(table.step.astype(np.int64), work.max(axis=0), {}, np.full(work.shape[1], np.nan))
    finding = _one(analyse(run_of(table, journal=journal, config={"train": options})), "start_up")
    assert said in finding.advice and ("compile" in finding.advice) == bool(options)


def test_a_rank_that_is_stopped_seldom_is_reported_without_statistics() -> None:
    work = _work()[:2]
    work[1, ::25] += 490.0
    text = _one(_analysed(work, facts={"stopped_us": [0.0, 2 * 490e3]}), "stopped").text
    assert "rank 1 on host0" in text and "19.6 ms per step" in text
    assert not _of(_analysed(work, facts={"stopped_us": [0.0, 0.0]}), "stopped")


@pytest.mark.parametrize(("link_s", "reported"), [(0.012, True), (0.06, False)])  # 10 and 2 GB/s
def test_a_slow_bus_is_reported_with_the_speed_of_the_link(link_s: float, reported: bool) -> None:
    table = table_of(_work(), exchange_ms=6.0)
    turns = [Turn("g", float(t), {"MPI_ALLREDUCE": 6000.0}, 6_000_000) for t in table.ready_us.max(axis=0)]
    found = analyse(run_of(table, horovod=[trace_of(turns)], link=[(80_000_000, link_s)]))  # at 1.5 GB/s
    assert ("bandwidth" in _kinds(found)) == reported


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
    small = _one(_timeline({"MPI_ALLREDUCE": 900.0}, tensors=100), "small_tensors")
    assert "FUSION_THRESHOLD" not in small.advice  # 128 MiB is what it is anyway
    assert "fusion_copies" in _kinds(_timeline({"MEMCPY_IN_FUSION_BUFFER": 9000.0, "MPI_ALLREDUCE": 5000.0}))


def test_every_flag_that_is_advised_exists() -> None:
    modules = Path(hvdtrain.timeline.__path__[0]).rglob("*.py")
    advised = {flag for module in modules for flag in re.findall(r"--[a-z_]+\.[a-z_]+", module.read_text())}
    parser = make_parser(load_task_function("language_model"))
    known = {option for action in parser._actions for option in action.option_strings}
    assert {"--loader.workers", "--parallel.compression"} <= advised <= known


def test_findings_are_ordered_by_what_they_cost() -> None:
    costs = [finding.cost_ms or 0.0 for finding in _analysed(exchange_ms=3.0, data=_each(9)).findings]
    assert costs == sorted(costs, reverse=True) and len(costs) >= 2


def test_a_single_stalled_step_is_reported() -> None:
    """The journal has it; no rank was later than the others."""
    start = JournalStart({}, 1, 200)
    start.steps.extend(range(1, 201))
    start.seconds.extend(5.0 if step == 30 else 0.1 for step in range(1, 201))
    text = _one(_analysed(run={"start": start, "starts": [start]}), "pause").text
    assert text == "1 step stalled, in step 30, 4.90 s in total; on all ranks at once"


def _delayed(table: StepTable, exchange_ms: Floats) -> StepTable:
    """The same with longer exchanges [steps], after which all is later."""
    after = 1e3 * np.cumsum(exchange_ms)
    moved = {name: getattr(table, name) + after for name in ("released_us", "end_us")}
    before = after - 1e3 * exchange_ms
    return replace(table, **moved, **{name: getattr(table, name) + before for name in ("start_us", "ready_us")})


def _stalled(more_ms: Floats, *, of_ranks: bool) -> str:
    """The finding of a run in which some steps stall: before all ranks are ready, or in the exchange."""
    table = _delayed(table_of(_work() + more_ms * of_ranks), more_ms * (not of_ranks))
    start = JournalStart({}, 1, SHAPE[1])
    start.steps.extend(table.step.tolist())
    start.seconds.extend((np.diff(table.released_us[0], prepend=table.start_us[0, 0]) / 1e6).tolist())
    found = analyse(run_of(table, start=start, starts=[start]))
    return _one(found, "pause").text


def test_stamps_show_where_steps_stalled() -> None:
    stalls = np.zeros(SHAPE[1])
    stalls[29::40] = 500.0
    assert _stalled(stalls, of_ranks=False).endswith("; after the last rank was ready")
    assert _stalled(stalls, of_ranks=True).endswith("; on all ranks at once")
    stalls = np.where((np.arange(SHAPE[1]) >= 100) & (np.arange(SHAPE[1]) < 105), 500.0, 0.0)
    assert "5 steps stalled, in steps 101, 102, 103, 104 and others" in _stalled(stalls, of_ranks=False)


@pytest.mark.parametrize(
    ("rank", "words"), [(1, "waited for rank 1 on host0 then"), (None, "what else ran on this host")]
)
def test_longer_waits_are_not_the_networks_where_a_rank_is_late_or_no_network_is(rank: int | None, words: str) -> None:
    slow, ms = np.zeros(SHAPE), np.full(SHAPE[1], 25.0)
    slow[1] = 10.0
    ms[80:120] += 50.0
    slow[1, 80:120] += 50.0 * (rank is not None)
    table = table_of(_work() + slow)
    if rank is None:
        table = _delayed(table, ms - 25.0)
    journal = JournalSteps(table.step.astype(np.int64), ms, {"wait": ms - 20.0}, np.full(SHAPE[1], np.nan))
    found = analyse(run_of(table, journal=journal))
    (change,) = _of(found, "change")
    assert words in change.advice


@pytest.mark.parametrize(("part", "words"), [("data", "--loader.workers 1"), ("gc", "gc.freeze"), ("forward", "cores")])
def test_jitter_has_the_cause_of_the_last_ranks(part: str, words: str) -> None:
    """In every fifth step one rank in turn waits for data, for example."""
    more = np.zeros(SHAPE)
    for number, step in enumerate(range(4, SHAPE[1], 5)):
        more[number % SHAPE[0], step] = 30.0
    found = _one(_analysed(**{part: more, **({"forward": more} if part == "gc" else {})}), "jitter")
    assert ("mostly by" in found.text) == (part != "forward") and words in found.advice


def test_a_broadcast_is_never_in_the_cache() -> None:
    turns = []
    for step in range(40):
        for name in ("reducescatter.g/0", "broadcast.p/0"):
            begin = 1e5 * step + 1e3 * len(name)
            turns.append(
                Turn(name, begin, {"NEGOTIATE_ALLREDUCE": 5.0, "REDUCESCATTER": 500.0}, 4000, {0: begin, 1: begin + 1})
            )
    assert "cache" not in _kinds(analyse(RunTrace(Path("t.json"), 2, horovod=[trace_of(turns)])))


@pytest.mark.parametrize(("steps", "error_us", "known"), [(7, 0.0, False), (40, math.inf, False), (40, 1.0, True)])
def test_a_straggler_that_cannot_be_known_is_no_figure(steps: int, error_us: float, known: bool) -> None:
    table = table_of(_work()[:, :steps] + _each(5.0, rank=1)[:, :steps] * (not known), error_us=error_us)
    found = analyse(run_of(table))
    assert ("straggler_ms" in figures(found)) == known
    assert f"): {'none' if known else 'unknown'} (" in to_text(found)
