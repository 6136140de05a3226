"""Figures of the exchange: times, bytes, bandwidth, the most expensive gradients, and the steps of a Timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.compression.sizes import Bucket
from hvdtrain.compression.table import parse
from hvdtrain.spans import EXCHANGE, MAIN
from hvdtrain.timeline.analysis import communication
from hvdtrain.timeline.analysis.analysis import Communication
from hvdtrain.timeline.analysis.communication import bus_bytes, measure_communication, modules_of, tensor_module
from hvdtrain.timeline.analysis.phases import PHASES, count_steps, kind_of, only_steps, recurring
from hvdtrain.timeline.columns import BucketFacts, HorovodTrace, RunTrace, StepTable
from tests.support.step_tables import columns_of, table_of
from tests.support.timelines import Turn, spans_of, trace_of

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


def _alone(trace: HorovodTrace, size: int = 4) -> Communication:
    run = RunTrace(Path("timeline.json"), size, horovod=[trace], link=[(1000, 1e-4), (80_000_000, 0.03)])
    return measure_communication(run)


def _stamped(turns: list[Turn], steps: StepTable) -> Communication:
    return measure_communication(RunTrace(Path("run"), 2, steps=steps, horovod=[trace_of(turns)]))


def _spans(compression: str = "none", horovod: Sequence[HorovodTrace] = ()) -> RunTrace:
    """One step of 30 ms: backward to 20, wait to 25; bucket 0 travels 10 to 18, bucket 1 18 to 24."""
    rows = [("step", MAIN, 3, 0, 30), ("forward", MAIN, 3, 0, 10), ("backward", MAIN, 3, 10, 20)]
    rows += [("wait", MAIN, 3, 20, 25), ("exchange", EXCHANGE, 3, 10, 18), ("exchange", EXCHANGE + 1, 3, 18, 24)]
    carried = [[f"layers.{i}.up.weight", f"layers.{i}.down.bias"] for i in range(2)]
    facts = {EXCHANGE + i: BucketFacts(f"gradients/{i}", carried[i], [[4]], "float32", 50) for i in range(2)}
    config = {"parallel": {"compression": compression}}
    return RunTrace(Path("run"), 2, config, spans=[spans_of(rows, facts=facts)], horovod=list(horovod))


def test_times_and_bytes_are_of_a_step_and_the_bandwidth_is_nccls() -> None:
    found = _alone(_trace())
    phases = {part.name: part.ms.value for part in found.phases}
    assert phases == {"transfer": pytest.approx(8.0, rel=0.01), "fusion copies": 0.4, "negotiation": 2.0}
    assert found.busy_ms == pytest.approx(10.4, rel=0.01)
    assert found.bytes_per_step == pytest.approx(16e6, rel=0.01)
    assert found.bus_gb_per_s == pytest.approx(3.0, rel=0.01), "2 x 3/4 of 8 MB in 4 ms"
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
    result, sent = given / size, (size - 1) / size * given
    if operation == "ALLGATHER":
        result, sent = given * size, (size - 1) * given
    turns = [Turn("g", 1e4 * i, {f"MPI_{operation}": 1000.0}, int(result), operation=operation) for i in range(10)]
    found = _alone(trace_of(turns), size)
    assert found.bytes_per_step == pytest.approx(given)
    assert found.bus_gb_per_s == pytest.approx(sent / 1e-3 / 1e9)


def test_no_bandwidth_without_the_number_of_bytes() -> None:
    """Horovod says nothing of an alltoall's bytes; the run's own compression does."""
    unknown = [Turn("t", 1e4 * i, {"MPI_ALLTOALL": 1000.0}, operation="ALLTOALL") for i in range(10)]
    known = [Turn("r", 1e4 * i + 2e3, {"MPI_ALLREDUCE": 1000.0}, 1000) for i in range(10)]
    found = _alone(trace_of([*unknown, *known]))
    assert found.busy_ms == pytest.approx(2.0) and found.bytes_per_step is None and found.bus_gb_per_s is None
    sent = sum(parse("int8").payload(Bucket([[4]], "float32", 50), 2).values())
    opening = Turn("broadcast.timeline/open", 0.0, {"MPI_BCAST": 10.0}, operation="BROADCAST")
    for tensor, expected in (("alltoall.gradients/0/shares", 2 * sent), ("alltoall.tokens", None)):
        trace = trace_of([opening, *(replace(turn, tensor=tensor) for turn in unknown)])
        assert measure_communication(_spans("int8", [trace])).bytes_per_step == expected


@pytest.mark.parametrize("times_a_step", [1, 3])  # of experts' tokens, say: then it is the stamps that tell steps
def test_a_window_of_steps_that_have_no_stamps_has_as_many_steps(times_a_step: int) -> None:
    """The sums of its last step may be there after the Timeline's last event."""
    table = table_of(np.full((2, 60), 20.0), exchange_ms=4.0)
    ready = table.ready_us.max(axis=0)[19:40]
    turns = [Turn("g", t + 1000 * i, {"MPI_ALLREDUCE": 900.0}, 1000) for t in ready for i in range(times_a_step)]
    for stamped in (table.step > 0, (table.step <= 16) | (table.step > 32)):
        found = _stamped(turns, columns_of(table, stamped))
        assert found.bytes_per_step == pytest.approx(1000 * times_a_step)
        assert found.busy_ms == pytest.approx(0.9 * times_a_step)


def test_what_lies_in_the_wait_is_not_hidden() -> None:
    table = table_of(np.full((2, 30), 20.0), exchange_ms=2.0)
    turns = [Turn("g", t - 6000.0, {"MPI_ALLREDUCE": 8000.0}, 1000) for t in table.ready_us.max(axis=0)]
    found = _stamped(turns, table)
    assert found.hidden_share == pytest.approx(0.75, rel=0.02)
    assert found.busy_ms == pytest.approx(8.0, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("negotiation", ["NEGOTIATE_ALLGATHER"]),
        ("queue", ["WAIT_FOR_DATA", "QUEUE"]),
        ("fusion copies", ["MEMCPY_OUT_FUSION_BUFFER", "MEMCPY_IN_HOST_BUFFER"]),
        ("transfer", ["NCCL_REDUCESCATTER", "MPI_ALLTOALL", "GLOO_ALLREDUCE", "ADASUM_ALLREDUCE"]),
        ("", ["ALLREDUCE"]),
        ("other", ["INIT_NCCL", "ALLOCATE_OUTPUT"]),
    ],
)
def test_every_phase_of_horovod_has_a_kind(kind: str, names: list[str]) -> None:
    assert {kind_of(name) for name in names} == {kind}
    assert kind in (*PHASES, "", "other")


def test_spans_tell_of_the_exchange_where_horovod_does_not() -> None:
    run = _spans()
    found = measure_communication(run)
    assert found.busy_ms == pytest.approx(14.0) and found.hidden_share == pytest.approx(10 / 14)
    first, second = communication.top_carriers(run)
    assert (first.name, first.ms, first.exposed_ms) == ("gradients/1", pytest.approx(6.0), pytest.approx(4.0))
    assert (second.name, second.ms, second.exposed_ms) == ("gradients/0", pytest.approx(8.0), pytest.approx(0.0))
    assert first.modules == ["layers.1.up", "layers.1.down"] and first.nbytes == 200


def test_to_wait_for_a_late_rank_is_not_exposed_exchange() -> None:
    table = table_of(np.array([[20.0], [23.0]]))  # ready after 20 and 23 ms, at other moments
    moments = {name: getattr(table, name) - table.ready_us[0, 0] + 20_000.0 for name in ("ready_us", "released_us")}
    found = {
        each.name: each.exposed_ms
        for each in communication.top_carriers(replace(_spans(), steps=replace(table, **moments)))
    }
    late_ms = float(moments["ready_us"][1, 0]) / 1e3 - 20
    assert found == {"gradients/1": pytest.approx(24 - 20 - late_ms), "gradients/0": pytest.approx(0.0)}


@pytest.mark.parametrize(("name", "sent"), [("none", 200), ("int8", None), ("powersgd:4", 16), ("auto", None)])
def test_bytes_of_spans_are_those_of_the_compression(name: str, sent: int | None) -> None:
    run = _spans(name)
    found, carried = measure_communication(run).bytes_per_step, communication.top_carriers(run)[0].nbytes
    if name == "int8":
        assert found == 2 * sum(parse(name).payload(Bucket([[4]], "float32", 50), 2).values()) != 400
    else:
        assert (found, carried) == (sent and 2 * sent, sent)


def test_tensors_of_any_program_are_listed_by_their_time() -> None:
    found = communication.top_carriers(RunTrace(Path("timeline.json"), 4, horovod=[_trace()]))
    assert found[0].modules in (["layers.0"], ["layers.1"])
    assert found[0].ms == pytest.approx(5.2) and found[0].nbytes == 8_000_000
    assert len(found) <= communication.MOST


def test_modules_are_named_as_far_as_they_have_something_in_common() -> None:
    deep = [f"model.layers.{i}.mlp.{w}.weight" for i in range(2) for w in ("up", "down")]
    assert modules_of(deep) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert modules_of([f"layer{i}.weight" for i in range(6)]) == ["layer0", "layer1", "and 4 more"]
    assert modules_of(["weight"]) == ["weight"] and modules_of([]) == []
    assert tensor_module("DistributedOptimizer.Allreduce.fc1.weight") == "fc1"
    assert tensor_module("allreduce.gradients/3") == "gradients/3"


STEP_US, STEPS = 1000.0, 10
ONCE = "evaluation"


def _with_start(steps: int = STEPS, once_at: float = 8.5) -> HorovodTrace:
    """Two tensors a step, a broadcast before them, and a tensor that comes once."""
    phases = {"MPI_ALLREDUCE": 100.0}
    turns = [Turn("model", 0.0, {"MPI_BCAST": 400.0}, operation="BROADCAST")]
    for step in range(1, steps + 1):
        turns += [Turn(name, step * STEP_US + at, phases) for name, at in (("a", 0.0), ("b", 500.0))]
    return trace_of([*turns, Turn(ONCE, once_at * STEP_US + 700.0, phases)])


def test_steps_are_the_turns_of_most_tensors_and_what_comes_once_is_none() -> None:
    trace = _with_start()
    assert count_steps(trace) == STEPS and count_steps(_with_start(1)) == 0 and count_steps(trace_of([])) == 0
    assert [name for name, again in zip(trace.tensors, recurring(trace), strict=True) if again] == ["a", "b"]


def test_it_is_steady_from_the_end_of_its_first_step_on() -> None:
    """However late a tensor that comes once may be."""
    found = only_steps(_with_start())
    assert found.start_us.min() == 2 * STEP_US
    assert count_steps(found) == STEPS - 1
    assert ONCE in {found.tensors[number] for number in found.tensor}


def test_of_few_steps_none_is_left_out() -> None:
    trace = _with_start(3, once_at=2.5)
    np.testing.assert_array_equal(only_steps(trace).start_us, trace.start_us)
