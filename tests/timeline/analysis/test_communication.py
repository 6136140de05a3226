"""Figures of the exchange: times, bytes, bandwidth, and the most expensive gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import parse
from hvdtrain.spans import EXCHANGE, MAIN
from hvdtrain.timeline.analysis import carriers, communication
from hvdtrain.timeline.analysis.carriers import modules_of, tensor_module
from hvdtrain.timeline.analysis.communication import bus_bytes
from hvdtrain.timeline.analysis.phases import PHASES, kind_of
from hvdtrain.timeline.analysis.rank_steps import from_ticks
from hvdtrain.timeline.columns import BucketFacts, HorovodTrace, RankSpans, RunTrace
from tests.support.step_tables import table_of
from tests.support.timelines import Turn, trace_of

_PHASES = {"NEGOTIATE_ALLREDUCE": 1000.0, "MEMCPY_IN_FUSION_BUFFER": 200.0, "MPI_ALLREDUCE": 4000.0}


def _trace(steps: int = 10, tensors: int = 2, size: int = 4) -> HorovodTrace:
    """Tensors of 8 MB that travel one after the other, and a broadcast before."""
    turns = [Turn("broadcast.start", 0.0, {"MPI_BCAST": 50.0}, 100, operation="BROADCAST")]
    for step in range(steps):
        for tensor in range(tensors):
            begin = 1e5 * (step + 1) + 1e4 * tensor
            ticks = {rank: begin + 10.0 * rank for rank in range(size)}
            turns.append(Turn(f"allreduce.layers.{tensor}.weight", begin, _PHASES, 8_000_000, ticks))
    return trace_of(turns)


def _alone(trace: HorovodTrace, size: int = 4) -> RunTrace:
    return RunTrace(Path("timeline.json"), size, horovod=[trace], link=[(1000, 1e-4), (80_000_000, 0.03)])


def test_times_and_bytes_are_of_a_step_and_the_bandwidth_is_nccls() -> None:
    found = communication.measure_communication(_alone(_trace()))
    assert found is not None
    phases = {part.name: part.ms.value for part in found.phases}
    assert phases == {"transfer": pytest.approx(8.0, rel=0.01), "fusion copies": 0.4, "negotiation": 2.0}
    assert found.busy_ms == pytest.approx(10.4, rel=0.01)
    assert found.bytes_per_step == pytest.approx(16e6, rel=0.01)
    # 2 x 3/4 of 8 MB in 4 ms
    assert found.bus_gb_per_s == pytest.approx(3.0, rel=0.01)
    assert found.link_gb_per_s == pytest.approx(1.5 * 80e6 / 0.03 / 1e9)


@pytest.mark.parametrize("operation", ["ALLREDUCE", "ALLGATHER", "ALLTOALL", "REDUCESCATTER"])
def test_the_bus_carries_what_a_ring_sends(operation: str) -> None:
    """Count the pieces that each rank of a ring passes on."""
    size, piece = 5, 1000.0
    whole = {"ALLREDUCE": size * piece, "REDUCESCATTER": size * piece, "ALLTOALL": size * piece, "ALLGATHER": piece}
    rounds = {"ALLREDUCE": 2 * (size - 1)}.get(operation, size - 1)
    assert bus_bytes(operation, whole[operation], size) == pytest.approx(rounds * piece)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("operation", ["ALLGATHER", "REDUCESCATTER"])
def test_bytes_are_those_handed_over_where_horovod_tells_those_of_the_result(operation: str, size: int) -> None:
    """Of an allgather that is what all give; of a reducescatter a share of what each gives."""
    given = 1e6
    result = given * size if operation == "ALLGATHER" else given / size
    turns = [Turn("g", 1e4 * i, {f"MPI_{operation}": 1000.0}, int(result), operation=operation) for i in range(10)]
    found = communication.measure_communication(_alone(trace_of(turns), size))
    assert found is not None and found.bytes_per_step == pytest.approx(given)
    sent = (size - 1) * given if operation == "ALLGATHER" else (size - 1) / size * given
    assert found.bus_gb_per_s == pytest.approx(sent / 1e-3 / 1e9)


def test_no_bandwidth_without_the_number_of_bytes() -> None:
    """Horovod says nothing of an alltoall's bytes."""
    kinds = {"ALLTOALL": -1, "ALLREDUCE": 1000}
    turns = [
        Turn(name, 1e4 * i + 2e3 * k, {f"MPI_{name}": 1000.0}, nbytes, operation=name)
        for i in range(10)
        for k, (name, nbytes) in enumerate(kinds.items())
    ]
    found = communication.measure_communication(_alone(trace_of(turns)))
    assert found is not None and found.busy_ms == pytest.approx(2.0)
    assert found.bytes_per_step is None and found.bus_gb_per_s is None
    for tensor, known in (("alltoall.gradients/0/shares", True), ("alltoall.tokens", False)):
        opening = Turn("broadcast.timeline/open", 0.0, {"MPI_BCAST": 10.0}, operation="BROADCAST")
        trace = trace_of([opening, *(replace(turn, tensor=tensor) for turn in turns if turn.operation == "ALLTOALL")])
        run = RunTrace(Path("run"), 2, {"parallel": {"compression": "int8"}}, spans=[_spans()], horovod=[trace])
        found = communication.measure_communication(run)
        sent = sum(parse("int8").payload(Bucket([[4]], "float32", 50), 2).values())
        assert found is not None and found.bytes_per_step == (2 * sent if known else None)


def test_the_last_steps_sums_may_be_there_after_the_timelines_last_event() -> None:
    table = table_of(np.full((2, 30), 20.0), exchange_ms=4.0)
    turns = [Turn("g", float(t), {"MPI_ALLREDUCE": 3700.0}, 1000) for t in table.ready_us.max(axis=0)[10:20]]
    found = communication.measure_communication(RunTrace(Path("run"), 2, steps=table, horovod=[trace_of(turns)]))
    assert found is not None and found.bytes_per_step == 1000 and found.busy_ms == pytest.approx(3.7)


def test_a_window_of_steps_that_have_no_stamps_has_as_many_steps() -> None:
    table = table_of(np.full((2, 60), 20.0), exchange_ms=4.0)
    ready = table.ready_us.max(axis=0)
    stamped = (table.step <= 16) | (table.step > 32)
    moments = {n: getattr(table, n)[:, stamped] for n in ("start_us", "ready_us", "released_us", "end_us")}
    parts = {name: values[:, stamped] for name, values in table.parts_us.items()}
    sparse = replace(table, step=table.step[stamped], block=table.block[stamped], parts_us=parts, **moments)
    for times_a_step in (1, 3):  # of experts' tokens, say: then it is the stamps that tell steps
        turns = [
            Turn("g", float(t) + 1000 * i, {"MPI_ALLREDUCE": 900.0}, 1000)
            for t in ready[19:40]
            for i in range(times_a_step)
        ]
        found = communication.measure_communication(RunTrace(Path("run"), 2, steps=sparse, horovod=[trace_of(turns)]))
        assert found is not None and found.bytes_per_step == pytest.approx(1000 * times_a_step)


def test_what_lies_in_the_wait_is_not_hidden() -> None:
    table = table_of(np.full((2, 30), 20.0), exchange_ms=2.0)
    ready = table.ready_us.max(axis=0)
    turns = [Turn("g", float(t) - 6000.0, {"MPI_ALLREDUCE": 8000.0}, 1000) for t in ready]
    run = RunTrace(Path("run"), 2, steps=table, horovod=[trace_of(turns)])
    found = communication.measure_communication(run)
    assert found is not None and found.hidden_share == pytest.approx(0.75, rel=0.02)
    assert found.busy_ms == pytest.approx(8.0, rel=0.05)


def test_every_phase_of_horovod_has_a_kind() -> None:
    for name, kind in {
        "NEGOTIATE_ALLGATHER": "negotiation",
        "WAIT_FOR_DATA": "queue",
        "QUEUE": "queue",
        "MEMCPY_OUT_FUSION_BUFFER": "fusion copies",
        "MEMCPY_IN_HOST_BUFFER": "fusion copies",
        "NCCL_REDUCESCATTER": "transfer",
        "MPI_ALLTOALL": "transfer",
        "GLOO_ALLREDUCE": "transfer",
        "ADASUM_ALLREDUCE": "transfer",
        "ALLREDUCE": "",
        "INIT_NCCL": "other",
        "ALLOCATE_OUTPUT": "other",
    }.items():
        assert kind_of(name) == kind
        assert kind in (*PHASES, "", "other")


def _spans() -> RankSpans:
    """One step of 30 ms: backward to 20, wait to 25; bucket 0 travels 10 to 18, bucket 1 18 to 24."""
    rows = [("step", MAIN, 0, 30), ("forward", MAIN, 0, 10), ("backward", MAIN, 10, 20), ("wait", MAIN, 20, 25)]
    rows += [("exchange", EXCHANGE, 10, 18), ("exchange", EXCHANGE + 1, 18, 24)]
    names = list(dict.fromkeys(row[0] for row in rows))
    carried = [[f"layers.{i}.up.weight", f"layers.{i}.down.bias"] for i in range(2)]
    facts = {EXCHANGE + i: BucketFacts(f"gradients/{i}", carried[i], [[4]], "float32", 50) for i in range(2)}
    return RankSpans(
        0,
        "host0",
        names,
        np.array([names.index(row[0]) for row in rows], np.int16),
        np.array([row[1] for row in rows], np.int32),
        np.full(len(rows), 3, np.int32),
        np.array([row[2] for row in rows], float) * 1e3,
        np.array([row[3] for row in rows], float) * 1e3,
        facts,
    )


def test_spans_tell_of_the_exchange_where_horovod_does_not() -> None:
    run = RunTrace(Path("run"), 2, spans=[_spans()])
    found = communication.measure_communication(run)
    assert found is not None and found.busy_ms == pytest.approx(14.0)
    assert found.hidden_share == pytest.approx(10 / 14)
    first, second = carriers.top_carriers(run)
    assert (first.name, first.ms, first.exposed_ms) == ("gradients/1", pytest.approx(6.0), pytest.approx(4.0))
    assert (second.name, second.ms, second.exposed_ms) == ("gradients/0", pytest.approx(8.0), pytest.approx(0.0))
    assert first.modules == ["layers.1.up", "layers.1.down"] and first.nbytes == 200


@pytest.mark.parametrize("name", ["none", "int8", "powersgd:4", "auto"])
def test_bytes_of_spans_are_those_of_the_compression(name: str) -> None:
    run = RunTrace(Path("run"), 2, {"parallel": {"compression": name}}, spans=[_spans()])
    found = communication.measure_communication(run)
    sent = {"none": 200, "powersgd:4": 16, "int8": None}.get(name)
    assert found is not None
    if name == "auto":
        assert found.bytes_per_step is None and carriers.top_carriers(run)[0].nbytes is None
    elif sent is not None:
        assert found.bytes_per_step == 2 * sent and carriers.top_carriers(run)[0].nbytes == sent
    else:
        payload = parse(name).payload(Bucket([[4]], "float32", 50), 2)
        assert found.bytes_per_step == 2 * sum(payload.values()) != 400


def test_tensors_of_any_program_are_listed_by_their_time() -> None:
    found = carriers.top_carriers(_alone(_trace()))
    assert found[0].modules in (["layers.0"], ["layers.1"])
    assert found[0].ms == pytest.approx(5.2) and found[0].nbytes == 8_000_000
    assert len(found) <= carriers.MOST


def test_modules_are_named_as_far_as_they_have_something_in_common() -> None:
    deep = [f"model.layers.{i}.mlp.{w}.weight" for i in range(2) for w in ("up", "down")]
    assert modules_of(deep) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert modules_of([f"layer{i}.weight" for i in range(6)]) == ["layer0", "layer1", "and 4 more"]
    assert modules_of(["weight"]) == ["weight"] and modules_of([]) == []
    assert tensor_module("DistributedOptimizer.Allreduce.fc1.weight") == "fc1"
    assert tensor_module("allreduce.gradients/3") == "gradients/3"


def test_ticks_tell_who_is_ready_when() -> None:
    rounds = from_ticks([_trace(steps=20)])
    assert rounds is not None and rounds.source == "ticks"
    assert rounds.work_ms.shape[0] == 4
    lag = rounds.work_ms - rounds.work_ms[0]
    np.testing.assert_allclose(lag.T, np.broadcast_to([0, 0.01, 0.02, 0.03], lag.T.shape), atol=1e-6)
    assert rounds.step_ms == pytest.approx(100.0)


def test_ticks_that_ended_early_are_too_few() -> None:
    assert from_ticks([_trace(steps=2)]) is None
    assert from_ticks([trace_of([Turn("x", 10.0 * i, {"ALLREDUCE": 1.0}) for i in range(9)])]) is None
