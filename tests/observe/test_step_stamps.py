"""Stamps of the steps of several ranks, as threads with clocks of their own, gathered and read again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.observe import stamps as written
from hvdtrain.observe.clocks import Clocks
from hvdtrain.observe.stamps import BLOCK, COLUMNS, Block, is_gathered, step_rows
from hvdtrain.observe.step_format import VERSION, ClockLine, StartLine
from hvdtrain.observe.step_stamps import StepStamps
from hvdtrain.spans import APART, DEVICE, EXCHANGE, PARTS, Spans
from tests.support.full_disk import room_for
from tests.support.step_tables import read_steps
from tests.support.thread_comm import ThreadComm, on_ranks

STEP_US, PART_US, LATE_US = 1000.0, 50.0, 30.0


class Clock:
    def __init__(self, ns: int = 0) -> None:
        self.ns = ns

    def __call__(self) -> int:
        return self.ns

    def pass_us(self, us: float) -> None:
        self.ns += round(us * 1e3)


def one_step(spans: Spans, clock: Clock, step: int, rank: int) -> None:
    """Parts of `PART_US` each, ready `LATE_US` later on each further rank, a whole of `STEP_US`."""
    began = clock.ns
    spans.step = step
    spans.add_size(100 * step)
    spans.add_size(rank)
    for name in ("data", "copy", "forward", "backward"):
        with spans(name):
            clock.pass_us(PART_US)
    clock.pass_us(LATE_US * rank)
    with spans("wait"):
        clock.ns = began + 400_000
    for name in ("clip", "optimizer"):
        with spans(name):
            clock.pass_us(PART_US)
    clock.ns = began + round(STEP_US * 1e3)
    spans.record("step", began)


def run(size: int, started_at: int, stop: int, finish: bool = True) -> list[Block]:
    """What rank 0 gathers of these steps."""
    gathered: list[Block] = []

    def put(record: Mapping[str, Any]) -> None:
        gathered.append(written.unpack(record["message"]))

    def body(comm: ThreadComm) -> None:
        clock = Clock(10**12 * (comm.rank + 1))
        spans = Spans(clock)
        clocks = Clocks(comm, ["one"] * size)
        laps = [7.0, *[math.nan] * (len(written.FACTS) - 2)]  # waits for a core 7 us a lap
        causes: Any = SimpleNamespace(read=lambda: laps, close=laps.clear)
        writer: Any = SimpleNamespace(put=put, close=lambda patience_s: None) if comm.rank == 0 else None
        stamps = StepStamps(comm, spans, clocks, causes, started_at, stop, writer)
        for step in range(started_at + 1, stop + 1):
            stamps.begin_step(step)
            one_step(spans, clock, step, comm.rank)
            if step % 10 == 0:
                with spans("evaluation"):
                    clock.pass_us(PART_US)
        if finish:
            stamps.finish()
        stamps.close()
        assert not laps and comm.in_flight == {}, "all is closed"

    on_ranks(size, body)
    return gathered


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("started_at", [0, 5])
@pytest.mark.parametrize("steps", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_every_step_is_gathered_once_with_its_times(size: int, started_at: int, steps: int) -> None:
    gathered = run(size, started_at, started_at + steps)
    numbers = [first + n for first, stamps, _, _ in gathered for n in range(stamps.shape[1])]
    assert numbers == list(range(started_at + 1, started_at + steps + 1))
    for first, stamps, facts, elements in gathered:
        step, rank = first + np.arange(stamps.shape[1]), np.arange(size)[:, None]
        assert np.array_equal(elements, 100 * step + rank)
        assert facts == {"cpu_wait_us": [7.0] * size}
        after_evaluation = ((step - 1) % 10 == 0) & (step - 1 > started_at)
        expected = {
            "ready": 4 * PART_US + LATE_US * rank,
            "sent": 4 * PART_US,
            "released": 400,
            "received": 400,
            "end": STEP_US,
            "aside": PART_US * after_evaluation,
            "forward": PART_US,
            "optimizer": PART_US,
        }
        for name, us in expected.items():
            since_us = stamps[:, :, 0] if name in written.MOMENTS else 0.0
            assert np.allclose(stamps[:, :, COLUMNS.index(name)] - since_us, us, atol=1e-3), name


def test_what_has_not_ended_well_loses_its_last_block_alone() -> None:
    gathered = run(2, 0, 2 * BLOCK + 2, finish=False)
    assert [first for first, *_ in gathered] == [1]  # the second is on its way, and no one waits for it


def test_blocks_get_sparser_and_never_end() -> None:
    for size in (1, 2, 8, 64, 4096):
        blocks = 1_000_000 // BLOCK
        gathered = [block for block in range(blocks) if is_gathered(block, size)]
        dense = max(4, 256 // size)
        assert gathered[:dense] == list(range(dense))
        expected = dense + dense / 2 * math.log2(blocks / dense)
        assert len(gathered) == pytest.approx(expected, rel=0.15)
        assert max(b - a for a, b in pairwise(gathered)) <= 4 * blocks / dense
        assert len(gathered) * 2000 * size < (9e6 if size <= 64 else 3e8)


def test_a_run_of_known_length_has_evenly_spread_blocks() -> None:
    for size, even in ((1, 128), (64, 128), (256, 64), (4096, 16)):
        steps = 1_000_000
        gathered = [block for block in range(steps // BLOCK) if is_gathered(block, size, steps)]
        assert len({block // (steps // BLOCK // even) for block in gathered}) >= even
        assert max(b - a for a, b in pairwise(gathered)) <= 2 * steps / BLOCK / even
        late = [block for block in gathered if block > steps / BLOCK / 2]
        assert even / 2 - 1 <= len(late) <= even / 2 + 256
        assert len(gathered) * 2000 * size < max(30e6, 2000 * size * 130)
    assert all(is_gathered(block, 64, 2000) for block in range(2000 // BLOCK))


@pytest.mark.parametrize("period", [128, 500, 512, 1000])
@pytest.mark.parametrize("size", [8, 64, 512])
def test_what_recurs_is_stamped_as_often_as_other_steps(size: int, period: int) -> None:
    steps = 1 << 18
    gathered = [block for block in range(steps // BLOCK) if is_gathered(block, size, steps)]
    stamped = sum(step // BLOCK in gathered for step in range(period - 1, steps, period))
    expected = steps / period * len(gathered) * BLOCK / steps
    assert abs(stamped - expected) <= 3 * math.sqrt(expected)


def test_a_sparse_run_still_tells_its_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.observe.step_stamps.is_gathered", lambda block, size, steps: block == 0)
    sizes = {first: stamps.shape[1] for first, stamps, *_ in run(2, 0, 5 * BLOCK + 4)}
    assert sizes == {1: BLOCK, 4 * BLOCK + 1: BLOCK, 5 * BLOCK + 1: 4}


def test_a_devices_own_times_stand_in_the_place_of_the_hosts_and_a_step_that_is_not_kept_is_unknown() -> None:
    clock = Clock(1_000_000)
    spans = Spans(clock)
    one_step(spans, clock, 1, 0)
    kept, missing = step_rows(spans.raw_events(), 1, 2)
    assert math.isnan(missing[0]) and not math.isnan(kept[0])
    spans.record("wait", 5_000_000, DEVICE, 6_000_000, 1)
    spans.record("forward", 3_000_000, DEVICE, 3_500_000, 1)
    spans.record("forward", 4_000_000, DEVICE, 4_500_000, 1)
    spans.record("exchange", 0, EXCHANGE, 9_000_000, 1)
    (row,) = step_rows(spans.raw_events(), 1, 1)
    found = {name: ns / 1e3 for name, ns in zip(COLUMNS, row, strict=True)}
    assert (found["ready"], found["released"], found["wait"], found["forward"]) == (5000, 6000, 1000, 1000)
    assert found["sent"] == 1000 + 4 * PART_US and found["received"] == 1400
    assert found["start"] == 1000 and found["data"] == PART_US


def test_a_wait_for_other_ranks_is_taken_off_the_pass_around_it() -> None:
    clock = Clock()
    spans = Spans(clock)
    spans.step = 1
    with spans("step"):
        for name, inner in (("forward", "gather"), ("forward", "activations"), ("backward", "activations")):
            with spans(name):
                clock.pass_us(3)
                with spans(inner):
                    clock.pass_us(1)
        with spans("wait"):
            clock.pass_us(0.5)
    (row,) = step_rows(spans.raw_events(), 1, 1)
    found = dict(zip(COLUMNS, row, strict=True))
    expected = {"forward": 6000, "gather": 1000, "activations": 2000, "backward": 3000, "wait": 500}
    assert {name: found[name] for name in expected} == expected
    assert sum(found[name] for name in expected) == found["end"] - found["start"]


def _clocks(size: int) -> Clocks:
    comm: Any = SimpleNamespace(rank=0, size=size)
    return Clocks(comm, ["one"] * size)


def _write(path: Path, gathered: list[Block], size: int, warn: Callable[[str], None], start: int = 0) -> None:
    offsets = _clocks(size)
    file = written.StepFile(path, warn, offsets, 5.0, pytest.fail)
    known = [offsets.offset(rank, 0.0) for rank in range(size)]
    clock = ClockLine.from_offsets(known)
    file.append(StartLine(VERSION, start, size, 0, ["a"] * size, ["one"] * size, 5.0, clock=clock))
    for block in gathered:
        file.append(written.block_line(block, known, 5.0))
    file.close()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    gathered = run(2, 0, 2 * BLOCK + 3)
    _write(tmp_path / "steps.jsonl", gathered, 2, pytest.fail)
    assert written.starts_so_far(tmp_path / "steps.jsonl") == 1
    (table,) = read_steps(tmp_path)
    assert table.step.tolist() == list(range(1, 2 * BLOCK + 4))
    assert table.block.tolist() == [0] * BLOCK + [1] * BLOCK + [2] * 3
    assert np.array_equal(table.elements, 100 * table.step + np.arange(2)[:, None])
    stamps = np.concatenate([s for _, s, *_ in gathered], axis=1)
    for name in ("start", "ready", "released", "end"):
        expected = stamps[:, :, COLUMNS.index(name)]
        assert np.allclose(getattr(table, f"{name}_us"), expected, atol=0.06, rtol=0)
    for name in (*PARTS, "gc"):
        assert np.allclose(table.parts_us[name], stamps[:, :, COLUMNS.index(name)], atol=0.06, rtol=0)
    assert table.facts == [{"cpu_wait_us": [7.0, 7.0]}] * 3
    assert table.clock_error_us.tolist() == [0, 0]


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    gathered = run(1, 0, 2 * BLOCK)
    said: list[str] = []
    (tmp_path / "steps.jsonl").touch()
    with room_for(tmp_path / "steps.jsonl", 300):
        _write(tmp_path / "steps.jsonl", gathered, 1, said.append)
    assert len(said) == 1 and "training continues" in said[0]
    assert read_steps(tmp_path) == []


def test_sinks_get_the_lateness_of_ranks() -> None:
    (gathered,) = run(2, 0, 5)
    aligned = gathered._replace(stamps=gathered.stamps.copy())
    aligned.stamps[:, :, : len(written.MOMENTS)] -= gathered.stamps[:, :1, :1]
    event = written.ranks_event(aligned, [_clocks(2).offset(0, 0.0)] * 2)
    assert event["at_step"] == 5
    assert event["late_ms"] == pytest.approx([0, LATE_US / 1e3])
    assert event["wait_ms"] == pytest.approx([LATE_US / 1e3, 0])
    assert event["exposed_ms"] == pytest.approx([0.17, 0.17]), "without the wait for the later one"
    assert event["step_ms"] == pytest.approx([1, 1])


def test_workers_that_train_apart_wait_and_compare_clocks_only_where_all_exchange() -> None:
    clock = Clock(1_000_000)
    spans = Spans(clock)
    for step in (1, 2):
        one_step(spans, clock, step, 0)
        spans.record(APART, clock.ns)
    began = clock.ns
    with spans("wait"):
        clock.pass_us(70)
    alone, last = (dict(zip(COLUMNS, row, strict=True)) for row in step_rows(spans.raw_events(), 1, 2))
    assert math.isnan(alone["received"]) and alone["wait"] == 200_000
    assert (last["ready"], last["released"], last["received"]) == (began, clock.ns, clock.ns)
    assert last["wait"] == 270_000, "all waits of the step count"
    rows = np.array([[[*alone.values()], [*last.values()]]] * 2) / 1e3
    rows[1, :, COLUMNS.index("ready")] += LATE_US
    event = written.ranks_event(Block(1, rows, {}, np.zeros((2, 2))), [_clocks(2).offset(0, 0.0)] * 2)
    assert event["late_ms"] == pytest.approx([0, LATE_US / 2e3])
    assert event["exposed_ms"] == pytest.approx([0.235 - LATE_US / 2e3, 0.235])
