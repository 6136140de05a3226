"""A run folder or a Timeline as a trace: missing parts are reported, anything else is an error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from hvdtrain.errors import HvdtrainError, TraceError
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.report.form import to_bytes
from hvdtrain.timeline.report.page import to_html
from hvdtrain.timeline.report.terminal import summary_lines, to_text
from hvdtrain.timeline.run import load
from tests.support.journals import FakeRun
from tests.timeline.test_steps import block, start

TRACES = Path(__file__).parent / "traces"
ALL = sorted(TRACES.glob("*.json.gz"))


def _lines(path: Path, *lines: object, mode: str = "wb") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in lines)


def _started(size: int = 2, **observe: object) -> dict[str, object]:
    return {"event": "started", "size": size, "config": {"observe": observe}, "time": 1.0}


CLOCK = {"offset_us": [0.0, 0.0], "error_us": [0.0, 0.0]}


def _run(folder: Path) -> Path:
    """Ten steps of two ranks, the second of two starts; rank 1's spans are lost."""
    first: list[object] = [{"event": "warning", "text": "of the first start"}, _started()]
    _lines(folder / "journal.jsonl", *first, {"event": "warning", "text": "something"})
    head = {**start(1), "at_step": 0, "clock_ids": ["x", "x"], "origin_us": 5e9, "clock": CLOCK}
    begins = {"start_us": 0, "ready_us": 15_000, "released_us": 17_000, "end_us": 19_000}
    moments = {name: [[20_000 * s + at for s in range(10)]] * 2 for name, at in begins.items()}
    steps = block(1, **moments, parts_us={"forward": [[5000] * 10] * 2}, facts={}, clock=CLOCK)
    _lines(folder / "timeline" / "steps.jsonl", {**head, "start": 0}, head, steps)
    clock = {"start_time_since_epoch_in_micros": 1e15, "monotonic_us": 5e9, "clock_id": "x", "start": 1}
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0 on a"}},
        {"name": "clock", "ph": "M", "pid": 0, "tid": 0, "args": clock},
        {"name": "step", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 19_000.0, "args": {"step": 1}},
    ]
    (folder / "timeline" / "spans-rank-0.json").write_bytes(orjson.dumps(events))
    return folder


def _timeline(path: Path, epoch_us: float) -> None:
    """A collective 3 ms after `epoch_us`, of 1 ms."""
    stamp = orjson.dumps({"start_time_since_epoch_in_micros": round(epoch_us)}).decode()
    lines = [
        f'{{"name": "process_name", "ph": "M", "pid": 0, "args": {stamp}}}',
        '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}}',
        '{"ph": "B", "name": "ALLREDUCE", "ts": 3000, "pid": 1},{"ph": "E", "ts": 4000, "pid": 1}',
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]")


def test_the_last_start_of_a_run_is_read(tmp_path: Path) -> None:
    run = load(_run(tmp_path / "r"))
    assert run.size == 2 and run.warnings == ["something"]
    assert list(run.steps.step) == list(range(1, 11))
    assert run.link == [(1024, 1e-4)] and [spans.rank for spans in run.spans] == [0]
    assert any("no spans of rank 1:" in note for note in run.notes)
    analysis = analyse(run)
    assert analysis.title == "r" and analysis.budget is not None
    assert analysis.budget.step_ms.value == pytest.approx(20.0)
    assert load(tmp_path / "r" / "timeline").steps is not None


def test_steps_and_events_of_the_journal_are_read(tmp_path: Path) -> None:
    run = _run(tmp_path / "r")
    assert load(run).journal is None
    steps = [{"step": n, "step_s": n / 10, "forward_s": 0.01, "tokens": 64} for n in (1, 2, 3)]
    more: list[object] = [{"event": "config_changed", "at_step": 2}, {"event": "config_changed", "at_step": "x"}]
    more += [{"event": "evaluation", "at_step": at, "seconds": 2.0**at} for at in (0, 1, 2, 3)]
    broken = [{"step": "4", "step_s": 1.0}, {"step": 4, "step_s": None}, {"step": 3, "step_s": 0.5, "tokens": "many"}]
    _lines(
        run / "journal.jsonl", {**_started(), "size": 1}, {"step": 9, "step_s": 9.0}, _started(), *steps, *more, *broken
    )
    found = load(run)
    assert found.journal.step.tolist() == [1, 2, 3] and found.journal.step_ms.tolist() == [100, 200, 500]
    assert found.journal.parts_ms["forward"].tolist() == [10, 10, 0]
    assert found.journal.tokens[:2].tolist() == [64, 64] and np.isnan(found.journal.tokens[2])
    assert len(found.start.events_named("evaluation")) == 4
    analyse(found)


def _again(folder: Path, number: int, size: int, *, stamped: bool) -> None:
    """A later start, which died before its stamps."""
    config = {"observe": {}, "parallel": {"compression": "fp16"}}
    started = {"event": "started", "size": size, "config": config}
    _lines(folder / "journal.jsonl", started, {"event": "warning", "text": "of the later start"}, mode="ab")
    if stamped:
        zeros = [0.0] * size
        head = {**start(number), "size": size, "hosts": ["c"] * size, "clock_ids": ["x"] * size}
        clock = {"offset_us": zeros, "error_us": zeros}
        _lines(folder / "timeline" / "steps.jsonl", {**head, "at_step": 10, "clock": clock}, mode="ab")
    events = orjson.loads((folder / "timeline" / "spans-rank-0.json").read_bytes())
    events[1]["args"] |= {"start": number, "start_time_since_epoch_in_micros": 1e15 + 100e6}
    (folder / "timeline" / "spans-rank-0-1.json").write_bytes(orjson.dumps(events))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("stamped", [False, True])
def test_a_start_that_left_no_stamps_does_not_mix_with_the_one_before(tmp_path: Path, size: int, stamped: bool) -> None:
    folder = _run(tmp_path / "r")
    _lines(folder / "journal.jsonl", *({"step": step} for step in range(1, 11)), mode="ab")
    _timeline(folder / "timeline" / "horovod-steps-1-5.json", 1e15 + 50_000)
    before = load(folder)
    _again(folder, 2, size, stamped=stamped)
    run = load(folder)
    assert run.size == 2 and run.config == before.config and run.warnings == ["something"]
    assert [spans.start_us[0] for spans in run.spans] == [spans.start_us[0] for spans in before.spans]
    assert [trace.start_us[0] for trace in run.horovod] == [trace.start_us[0] for trace in before.horovod]
    for notes, earlier in ((run.notes, True), (before.notes, False)):
        assert any("an earlier start" in note and "steps 1 to 10" in note for note in notes) == earlier


@pytest.mark.parametrize("other", [None, "a round before", "a resume", "a few steps after"])
def test_figures_say_of_which_rounds_they_are(other: str | None, tmp_path: Path) -> None:
    folder = _run(tmp_path / "r")
    file = folder / "timeline" / "steps.jsonl"
    _, head, block = map(orjson.loads, file.read_bytes().splitlines())
    later = [{**head, "start": 2, "at_step": 10}, {**block, "first_step": 11}]
    few = [later[0], {name: _first_5(value) for name, value in later[1].items()}]
    lines = {None: [head, block], "a round before": [head, block, *later], "a resume": later}
    _lines(file, *{**lines, "a few steps after": [head, block, *few]}[other])
    analysis = analyse(load(folder))
    text, brief = to_text(analysis), "\n".join(summary_lines(analysis))
    said = {"a round before": "steps 1 to 20 of 2 starts", "a resume": "only steps 11 to 20", None: "mean of 2 ranks"}
    for shown in (text, brief):
        assert said.get(other, "only steps 1 to 10") in shown
        assert ("only steps" in shown) == (other not in (None, "a round before"))
    assert any("last round" in note for note in analysis.notes) == (other == "a resume")
    assert any("steps 11 to 20" in note for note in analysis.notes) == (other in ("a round before", "a resume"))
    assert any("an earlier start is analysed" in note for note in analysis.notes) == (other == "a few steps after")


def _first_5(value: Any) -> Any:
    """The part of a block of ten steps for its first five."""
    if isinstance(value, dict):
        return {name: _first_5(each) for name, each in value.items()}
    return [row[:5] for row in value] if isinstance(value, list) and len(np.shape(value)) == 2 else value


def test_horovods_timeline_is_moved_onto_the_runs_clock_and_those_of_other_starts_left_out(tmp_path: Path) -> None:
    folder = _run(tmp_path / "r")
    _timeline(folder / "timeline" / "horovod-steps-1-5.json", 1e15 + 50_000)
    _timeline(folder / "timeline" / "horovod-steps-1-5-1.json", 1e15 - 3_600e6)
    (folder / "timeline" / "horovod-steps-9-9.json").write_text("no trace at all")
    run = load(folder)
    assert [trace.path.name for trace in run.horovod] == ["horovod-steps-1-5.json"]
    assert run.horovod[0].start_us[0] == pytest.approx(5e9 + 53_000)
    assert any("horovod-steps-9-9.json is ignored" in note for note in run.notes)


def test_a_timeline_that_the_user_had_recorded_counts_as_those_of_the_run(tmp_path: Path) -> None:
    folder = _run(tmp_path / "r")
    _timeline(tmp_path / "mine.json", 1e15 + 50_000)
    _lines(folder / "journal.jsonl", {**_started(), "horovod_timeline": str(tmp_path / "mine.json")})
    assert [trace.path.name for trace in load(folder).horovod] == ["mine.json"]
    (tmp_path / "mine.json").unlink()
    assert not load(folder).horovod


def test_segments_are_put_on_one_clock(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    _timeline(first, 1e15)
    _timeline(second, 1e15 + 10_000_000)
    run = load(first, second)
    assert [trace.start_us[0] for trace in run.horovod] == [3000, 10_003_000]
    budget = analyse(run).budget
    assert budget.step_ms.value == pytest.approx(2.0)


@pytest.mark.parametrize("lost", ["journal.jsonl", "timeline/steps.jsonl", "timeline/spans-rank-0.json", "timeline"])
def test_what_is_missing_is_a_note_and_no_error(tmp_path: Path, lost: str) -> None:
    folder = _run(tmp_path / "r")
    (folder / lost).rename(tmp_path / "lost")
    analysis = analyse(load(folder))
    assert to_text(analysis)
    assert lost == "journal.jsonl" or analysis.notes


@pytest.mark.parametrize("name", ["journal.jsonl", "timeline/steps.jsonl", "timeline/spans-rank-0.json", "config.yaml"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1, 2]", b"{}\n[]\n3\nnull\n", b'{"event": "start"'])
def test_what_is_damaged_is_no_error(tmp_path: Path, name: str, content: bytes) -> None:
    folder = _run(tmp_path / "r")
    (folder / name).write_bytes(content)
    assert to_text(analyse(load(folder)))


def test_a_folder_without_a_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for paths, said in (
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path], r"is not a run(.|\n)*journal.jsonl(.|\n)*notes.txt"),
        ([tmp_path / "notes.txt"], "not a Timeline"),
        ([_run(tmp_path / "r"), tmp_path], "only one run"),
    ):
        with pytest.raises(TraceError, match=said):
            load(*paths)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_real_traces_of_stock_programs_are_explained(path: Path) -> None:
    analysis = analyse(load(path))
    assert len(to_text(analysis).splitlines()) <= 40 and analysis.budget is not None
    parts_ms = sum(part.ms.value for part in analysis.budget.parts)
    assert parts_ms == pytest.approx(analysis.budget.step_ms.value, rel=0.01)


def test_ticks_of_a_real_trace_are_used() -> None:
    analysis = analyse(load(TRACES / "ticks-4-ranks.json.gz"))
    assert analysis.blame.source == "ticks" and analysis.size == 4
    assert not analysis.blame.late and "too few" in analysis.blame.reason


def test_the_last_operations_of_a_long_timeline_are_analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = TRACES / "training-4-ranks-gloo.json.gz"
    (whole,) = load(path).horovod
    monkeypatch.setattr("hvdtrain.timeline.run._MOST_OPERATIONS", 100)
    run = load(path)
    (last,) = run.horovod
    assert last.start_us.tolist() == whole.start_us[-100:].tolist()
    assert last.tick_us.tolist() == [us for us in whole.tick_us.tolist() if us >= last.start_us.min()]
    assert f"the last 100 of {len(whole.start_us):,} " in run.notes[-1]


def test_a_start_of_another_format_is_ignored_with_a_note(tmp_path: Path) -> None:
    own, other = ({"step": n, "time": 2.0, "step_s": 1.0} for n in (1, 2))
    _lines(tmp_path / "journal.jsonl", _started(), own, {**_started(), "format": 2}, other)
    run = load(tmp_path)
    assert len(run.starts) == 1 and run.history is not None and run.history.step.tolist() == [1]
    assert "start 1 of the journal has format 2" in run.notes[0]


_ODD: list[Any] = [None, "x", -3, 1e308, [], {}, True, [1], {"a": 1}, 0, "", -1e308]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 1e308 overflows
@pytest.mark.parametrize("seed", range(40))
def test_a_journal_with_odd_values_has_a_report_or_an_error_of_ours(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)

    def odd(*plain: Any) -> Any:
        return chance.choice([*plain, *_ODD])

    run = FakeRun(tmp_path / "a").start([1.0] * 30, step_s=0.5, end="")
    run.write({"event": "evaluation", "at_step": odd(), "loss": odd(), "seconds": odd(), "time": odd()})
    facts = {"size": odd(4), "devices": odd(), "goes_on": odd(), "unit": odd(), "format": chance.choice([1, 1, 2, "x"])}
    run.start([1.0] * 30, after=20, step_s=0.5, **facts, config=odd(run.config, run.config))
    for _ in range(3):
        run.write({chance.choice(["step", "event", "x"]): odd(), "step_s": odd(), "time": odd(), "tokens": odd()})
    run.write({"event": "flops", "per_sample": odd(1e9), "peak_per_s": odd(1e12), "time": 1.0})
    try:
        found = analyse(load(run.folder))
    except HvdtrainError:
        return
    assert to_bytes(found) and to_html(found) and to_text(found)
