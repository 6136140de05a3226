from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.timeline.steps import read_starts
from tests.support.step_tables import read_steps

ORIGIN_US = 1e9


def start(number: int, size: int = 2) -> dict[str, Any]:
    return {
        "version": 1,
        "event": "start",
        "start": number,
        "size": size,
        "at_step": 10 * number,
        "hosts": ["a", "b"][:size],
        "clock_ids": ["x", "y"][:size],
        "origin_us": ORIGIN_US,
        "link": [[1024, 1e-4]],
        "clock": {"offset_us": [0.0, 3.0][:size], "error_us": [0.0, 9.0][:size]},
    }


def block(first: int, count: int = 2, size: int = 2, **changed: Any) -> dict[str, Any]:
    def table(base: float) -> list[list[float]]:
        return [[base + 100 * (first + n) + rank for n in range(count)] for rank in range(size)]

    return {
        "event": "block",
        "first_step": first,
        "start_us": table(0),
        "ready_us": table(10),
        "released_us": table(20),
        "end_us": table(30),
        "parts_us": {"data": table(5)},
        "facts": {"cpu_wait_us": [1.0, None][:size]},
        "clock": {"offset_us": [0.0, 4.0][:size], "error_us": [0.0, 7.0][:size]},
        **changed,
    }


def write(folder: Path, *lines: Any) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "steps.jsonl").write_text(text)
    return folder


def test_a_table_a_start_in_rank_0s_clock(tmp_path: Path) -> None:
    write(tmp_path, start(0), block(1), block(9), start(1), start(2, 1), block(11, size=1))
    first, second = read_steps(tmp_path)
    assert first.step.tolist() == [1, 2, 9, 10] and first.block.tolist() == [0, 0, 1, 1]
    assert first.start_us[1].tolist() == [ORIGIN_US + us for us in (101, 201, 901, 1001)]
    assert first.parts_us["data"][0].tolist() == [105, 205, 905, 1005]
    assert first.parts_us["gc"].shape == (2, 4) and not first.parts_us["gc"].any()
    assert first.clock_error_us.tolist() == [0, 7]
    assert second.hosts == ["a"] and second.step.tolist() == [11, 12]
    assert [s.number for s in read_starts(tmp_path)] == [0, 1, 2]
    assert read_starts(tmp_path)[0].link == [(1024, 1e-4)]


def test_without_a_file_there_are_no_starts(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    "damaged",
    [
        *("\x00\x01\n", '{"event":"block","first_step":3\n', "[1]\n", block(3, start_us=[[1.0, 2.0]])),
        *(block(3, ready_us="no"), block(3, parts_us={"data": [[1], [2]]}), block(3, facts={"cpu_wait_us": [1]})),
        *(block(3, clock={}), block(3, count=0)),
    ],
)
def test_a_damaged_line_is_left_out_and_said(damaged: Any, tmp_path: Path) -> None:
    write(tmp_path, start(0), block(1), damaged, block(5))
    (found,) = read_starts(tmp_path)
    assert found.steps.step.tolist() == [1, 2, 5, 6]
    assert len(found.dropped) == 1 and "line 3" in found.dropped[0]


WRONG: dict[str, list[Any]] = {
    "size": [None, "2", 0, 3],
    "hosts": [["a"], "ab"],
    "clock_ids": [["x", None]],
    "origin_us": [None],
    "start": ["1"],
    "at_step": [[]],
    "link": [[[1024]], [[1024, None]]],
    "clock": [{}, [0.0], {"offset_us": [0.0, 1.0]}, {"offset_us": [0.0], "error_us": [0.0, 1.0]}],
}


@pytest.mark.parametrize(("field", "wrong"), [(field, wrong) for field in WRONG for wrong in WRONG[field]])
def test_a_start_that_is_damaged_is_left_out_and_said(field: str, wrong: Any, tmp_path: Path) -> None:
    """With its blocks, which are no other start's."""
    damaged = {name: value for name, value in {**start(1), field: wrong}.items() if value is not None}
    write(tmp_path, start(0), block(1), damaged, block(11), start(2), block(21))
    assert [table.step.tolist() for table in read_steps(tmp_path)] == [[1, 2], [21, 22]]
    assert [len(found.dropped) for found in read_starts(tmp_path)] == [0, 1, 0]
    assert "line 3" in read_starts(tmp_path)[1].dropped[0]
    write(tmp_path, damaged, block(1))
    (found,) = read_starts(tmp_path)
    assert not len(found.steps.step) and "line 1" in found.dropped[0]


@pytest.mark.parametrize("absent", ["clock", "link"])
def test_what_older_starts_do_not_say_is_no_damage(absent: str, tmp_path: Path) -> None:
    write(tmp_path, {name: value for name, value in start(0).items() if name != absent}, block(1))
    (found,) = read_starts(tmp_path)
    assert found.steps.step.tolist() == [1, 2] and not found.dropped


def test_cut_off_at_any_byte_it_gives_what_is_whole(tmp_path: Path) -> None:
    write(tmp_path, start(0), block(1), block(3, count=1))
    content = (tmp_path / "steps.jsonl").read_bytes()
    _, two, three = (n for n, byte in enumerate(content) if byte == 10)  # a last line may lack its end
    assert three == len(content) - 1
    for cut in range(len(content)):
        (tmp_path / "steps.jsonl").write_bytes(content[:cut])
        steps = [] if cut < two else [1, 2] if cut < three else [1, 2, 3]
        assert [table.step.tolist() for table in read_steps(tmp_path)] == ([steps] if steps else [])


def test_a_step_that_a_rank_does_not_know_is_left_out(tmp_path: Path) -> None:
    unknown = block(3)
    unknown["ready_us"][1][0] = None
    write(tmp_path, start(0), unknown)
    (table,) = read_steps(tmp_path)
    assert table.step.tolist() == [4]
    moments = (table.start_us, table.ready_us, table.released_us, table.end_us)
    assert {values.shape for values in (*moments, *table.parts_us.values())} == {(2, 1)}


def test_a_start_of_another_format_is_left_out_with_a_note(tmp_path: Path) -> None:
    newer, own = read_starts(write(tmp_path, {**start(0), "version": 2}, block(0), start(1), block(0)))
    assert not len(newer.steps.step) and len(own.steps.step)
    assert "has format 2" in newer.dropped[0]


def test_the_clock_of_a_device_adds_its_error(tmp_path: Path) -> None:
    (of_cpu,) = read_steps(write(tmp_path, start(0), block(0)))
    (of_gpu,) = read_steps(write(tmp_path, {**start(0), "devices": ["GPU-1", ""]}, block(0)))
    assert (of_gpu.clock_error_us - of_cpu.clock_error_us).tolist() == [100.0, 0.0]


def test_endless_nesting_is_damage(tmp_path: Path) -> None:
    deep = b'{"event":"start","version":1,"x":' + b"[" * 100_000
    (tmp_path / "steps.jsonl").write_bytes(deep + b"\n")
    assert read_starts(tmp_path) == []
