"""Horovod's Timeline read: real traces of stock programs, cut at every byte, edited at random, and strange ones."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvdtrain.errors import TraceError
from hvdtrain.timeline.columns import HorovodTrace
from hvdtrain.timeline.read import read_files, read_horovod
from hvdtrain.timeline.reading import trace_builder
from hvdtrain.timeline.reading.events import nbytes
from tests.timeline.plain_reader import read_plainly, spans_of, ticks_of

TRACES = Path(__file__).parent / "traces"
CONTENT = {file.name.removesuffix(".json.gz"): gzip.decompress(file.read_bytes()) for file in sorted(TRACES.glob("*"))}
WHOLE = [name for name in CONTENT if name.split("-")[0] not in ("killed", "window")]
EVENT = '{"ph": "B", "name": "QUEUE", "ts": 5, "pid": 99},{"ph": "E", "ts": 9, "pid": 99}'


def read(content: bytes, folder: Path, chunk_bytes: int = 1 << 22) -> HorovodTrace:
    file = folder / "trace.json"
    file.write_bytes(content)
    return read_horovod(file, chunk_bytes)


def assert_same(trace: HorovodTrace, content: bytes) -> None:
    plain = read_plainly(content)
    in_order = sorted(plain.spans, key=lambda span: span[2] + span[3])
    assert sorted(spans_of(trace)) == sorted(in_order)
    ends = trace.start_us + trace.duration_us
    assert np.all(np.diff(ends) >= 0)
    assert ticks_of(trace) == plain.ticks


@pytest.mark.parametrize("chunk_bytes", [1 << 22, 999])
@pytest.mark.parametrize("name", CONTENT)
def test_a_real_trace_is_read_as_the_plain_reader_reads_it(name: str, chunk_bytes: int, tmp_path: Path) -> None:
    packed, trace = read_horovod(TRACES / f"{name}.json.gz", chunk_bytes), read(CONTENT[name], tmp_path, chunk_bytes)
    assert_same(trace, CONTENT[name])
    assert spans_of(packed) == spans_of(trace) and packed.dropped == trace.dropped
    assert len(trace.phase) > 15 and (name not in WHOLE or trace.dropped == [])
    assert trace.epoch_us > 1.7e15


def test_what_the_traces_hold(tmp_path: Path) -> None:
    of_training, every = read(CONTENT["training"], tmp_path), read(CONTENT["ticks-4-ranks"], tmp_path)
    count = Counter((tensor, phase) for tensor, phase, *_ in spans_of(of_training))
    assert count["allreduce.0.weight", "ALLREDUCE"] == count["allreduce.0.weight", "NEGOTIATE_ALLREDUCE"] == 5
    sizes = {tensor: size for tensor, phase, _, _, size in spans_of(of_training) if phase == "ALLREDUCE"}
    assert sizes["allreduce.0.weight"] == 8 * 8 * 4 and sizes["allreduce.0.bias"] == 8 * 4
    ticks = Counter((tensor, rank) for tensor, rank, _ in ticks_of(every))
    assert [ticks["allreduce.0.weight", rank] for rank in range(4)] == [5, 5, 5, 5]
    assert len(of_training.tick_us) < len(every.tick_us) / 2  # those of steps that the cache answers are not written


def test_names_are_what_the_program_gave(tmp_path: Path) -> None:
    tensors = {name.removeprefix("allreduce.") for name in read(CONTENT["names"], tmp_path).tensors}
    assert {'say "hi"', "back\\slash", "two\nlines", "\x01\x1f control", "Gewicht.für.Größe.重み", 'x"}},'} <= tensors
    assert {'{"ph": "E", "ts": 1, "pid": 1}', "n" * 3000} <= tensors
    bad_utf_8 = read(CONTENT["training"].replace(b'"allreduce.0.weight"', b'"allreduce.\xff\xfe.weight"'), tmp_path)
    assert "allreduce.\ufffd\ufffd.weight" in bad_utf_8.tensors and bad_utf_8.dropped == []


def test_cut_at_every_byte_all_that_was_whole_is_read(tmp_path: Path) -> None:
    content = CONTENT["collectives"][:1000]
    assert read_plainly(content).spans and read_plainly(content).ticks
    for length in range(len(content) + 1):
        trace = read(content[:length], tmp_path, (1 << 22, 171, 50, 7)[length % 4])
        plain = read_plainly(content[:length])
        assert spans_of(trace) == plain.spans and ticks_of(trace) == plain.ticks
        if content[:length].strip(b"[], \n").endswith(b"}}") and not plain.still_open:
            assert trace.dropped == []


PUT = [b'"', b"{", b"}", b'{"ph": "', b"},", b"\\", b"0", EVENT.encode()]
EDITS = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 3), st.binary(max_size=3) | st.sampled_from(PUT)), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["training", "names", "killed"]), edits=EDITS, chunk=st.integers(200, 5000))
def test_edited_at_random_all_that_is_still_whole_is_read(
    name: str, edits: list[tuple[int, int, bytes]], chunk: int
) -> None:
    content = CONTENT[name][:4000]
    for place, removed, put in edits:
        at = place % (len(content) + 1)
        content = content[:at] + put + content[at + removed :]
    assume(not content.startswith(b"\x1f\x8b"))  # it is read as gzip
    with tempfile.TemporaryDirectory() as folder:
        try:
            trace = read(content, Path(folder))
        except TraceError:
            plain = read_plainly(content)
            assert not plain.spans + plain.ticks
            return
        assert_same(trace, content)
        assert spans_of(read(content, Path(folder), chunk)) == spans_of(trace)


@pytest.mark.parametrize("content", [b"", b"[", b"[\n", b"[]", b"  \n", b"[\n]\n", b"\xef\xbb\xbf[]"])
def test_a_file_without_events_is_an_empty_timeline(content: bytes, tmp_path: Path) -> None:
    trace = read(content, tmp_path)
    assert len(trace.phase) == len(trace.tick_us) == 0
    assert trace.dropped == ["the file has no events"]


TORCH = {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2}] * 99}
OURS = [{"name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": {"step": 1}}]


@pytest.mark.parametrize(
    "content",
    [json.dumps(TORCH), json.dumps(OURS), json.dumps(OURS, indent=1), "hello", "[1, 2]", '{"a": 1}', "\x7fELF\0" * 999],
)
@pytest.mark.parametrize("chunk_bytes", [1 << 22, 64])
def test_what_is_no_timeline_is_an_error_that_says_so(content: str, chunk_bytes: int, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a Timeline of Horovod") as caught:
        read(content.encode(), tmp_path, chunk_bytes)
    assert caught.value.expected and caught.value.found and caught.value.next_step


@pytest.mark.parametrize("name_bytes", [1 << 17, 5 << 20, 10 << 20])
@pytest.mark.parametrize("begins_with", ["metadata", "an event"])
def test_a_name_of_some_megabytes_costs_itself_only(name_bytes: int, begins_with: str, tmp_path: Path) -> None:
    content, name = CONTENT["training"], b"n" * name_bytes
    long = {
        "metadata": b'{"name": "process_name", "ph": "M", "pid": 99, "args": {"name": "%s"}},' % name,
        "an event": b'{"ph": "B", "name": "%s", "ts": 12, "pid": 3},' % name,
    }[begins_with]
    trace = read(b"[\n" + long + content[2:], tmp_path)
    assert spans_of(trace) == spans_of(read(content, tmp_path))
    assert trace.dropped[0].startswith("1 damaged place")


def test_what_comes_before_a_damage_of_a_packed_file_is_read(tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT["training"])
    whole, counts = spans_of(read(packed, tmp_path)), []
    for place in (len(packed) // 2, len(packed) - 100, len(packed) - 6):  # the last is of the checksum
        for chunk_bytes in (1 << 22, 4096):
            trace = read(packed[:place] + b"\xff" * 5 + packed[place + 5 :], tmp_path, chunk_bytes)
            assert spans_of(trace)[:40] == whole[:40] and "is damaged" in trace.dropped[0]
        counts.append(len(trace.phase))
    assert 40 <= counts[0] < counts[1] < counts[2] == len(whole)


def test_timelines_without_one_event_are_nothing_to_look_at(tmp_path: Path) -> None:
    empty, good = tmp_path / "empty.json", tmp_path / "good.json"
    empty.touch()
    good.write_bytes(CONTENT["training"])
    assert [len(trace.phase) > 0 for trace in read_files([empty, good])] == [False, True]
    with pytest.raises(TraceError, match="there is no event in"):
        read_files([empty, empty])


def test_a_missing_file_a_folder_and_a_fifo_are_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(TraceError, match="cannot be read"):
            read_horovod(path)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_trace_that_another_program_wrote_again_is_read(
    separators: tuple[str, str], indent: int | None, tmp_path: Path
) -> None:
    original = read(CONTENT["training"], tmp_path)
    events = [dict(reversed(list(event.items()))) for event in json.loads(CONTENT["training"])]
    again = read(json.dumps(events, separators=separators, indent=indent).encode(), tmp_path)
    assert spans_of(again) == spans_of(original) and ticks_of(again) == ticks_of(original)
    assert again.epoch_us == original.epoch_us and again.dropped == []
    names = [{"ph": "M", "name": "process_name", "pid": 99, "args": {"name": 'a "q" \n é'}}]
    assert read(json.dumps([*names, *json.loads(f"[{EVENT}]")]).encode(), tmp_path).tensors == ['a "q" \n é']


def test_an_older_horovod_wrote_a_line_an_event_no_stamp_and_no_end(tmp_path: Path) -> None:
    content = CONTENT["training"].replace(b"},{", b"},\n{").removesuffix(b"]") + b",\n"
    head = content.index(b"\n{", content.index(b"process_sort_index"))
    older = read(b"[" + content[head:], tmp_path)
    assert spans_of(older) == spans_of(read(CONTENT["training"], tmp_path))
    assert older.epoch_us is None and older.dropped == []


def test_consecutive_timelines_are_put_on_one_clock(tmp_path: Path) -> None:
    first, second = CONTENT["training"], CONTENT["collectives"]
    both = read(first + b"\n" + second, tmp_path)
    one, other = read(first, tmp_path), read(second, tmp_path)
    assert both.epoch_us == one.epoch_us
    shift = other.epoch_us - one.epoch_us
    moved = [(tensor, phase, start + shift, *rest) for tensor, phase, start, *rest in spans_of(other)]
    assert sorted(spans_of(both)) == sorted(spans_of(one) + moved)


def test_dropped_records_are_reported(tmp_path: Path) -> None:
    content, packed = CONTENT["training"], gzip.compress(CONTENT["training"])
    place, begin = content.index(b'"ts"', 3000), content.index(b'{"ph": "E"')
    for damaged, said in (
        (content[:place] + b"#" + content[place + 1 :], f"byte {content.rindex(b'{', 0, place)}"),
        (content[:-30], "ends in the middle"),
        (content[:-300], "without an end event"),
        (b"[\n" + content[begin:], "without a begin event"),
        (packed[:-20], "truncated"),
    ):
        assert any(said in line for line in read(damaged, tmp_path).dropped), said


def test_columns_go_to_the_disk_unless_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [np.arange(n, dtype=np.float64) for n in (3, 0, 40, 7, 1)]

    def filled() -> trace_builder.Column:
        column = trace_builder.Column("f8", in_memory_bytes=100)
        for part in parts:
            column.add(part)
        return column

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    on_disk = filled()
    monkeypatch.setattr(trace_builder.tempfile, "TemporaryFile", full)
    in_memory = filled()
    assert on_disk._file is not None and in_memory._file is None
    for column in (on_disk, in_memory):
        assert np.array_equal(column.finish(), np.concatenate(parts))


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "bool", "int16", "float16", "bfloat16", "int32", "float32", "int64"]
)
def test_bytes_are_those_of_torch(dtype: str) -> None:
    assert nbytes({"dtype": dtype, "shape": "[2, 3]"}) == 6 * getattr(torch, dtype).itemsize
