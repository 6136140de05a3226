"""The end of a run says where the time went, with the spans of all hosts; nothing that fails there fails the run."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.past_journal import is_finished
from hvdtrain.observe.span_trace import SpanTrace, TraceFile
from hvdtrain.timeline.analysis.analysis import figures
from hvdtrain.training.records.run_report import collect_spans, whole_lines
from tests.support.journals import read_events
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.support.toy import toy


def _train(folder: Path, **observe: Any) -> Any:
    return hvdtrain.train({"train": {"steps": 8}, "observe": observe, "run_dir": str(folder)}, toy)


def test_it_is_a_page_data_and_an_event(tmp_path: Path) -> None:
    result = _train(tmp_path)
    assert result.analysis.budget.step_ms.value > 0
    found = json.loads((tmp_path / "timeline" / "report.json").read_text())
    assert found["figures"]["step_ms"] == pytest.approx(result.analysis.budget.step_ms.value)
    page = (tmp_path / "timeline" / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "Step time by part" in page and "Memory of rank 0" in page
    held = read_events(tmp_path, "memory")
    assert [event["at_step"] for event in held] == [1, 8]
    assert result.analysis.memory.mib == held[-1]["mib"] and held[-1]["mib"]["activations and rest"] > 0
    (event,) = read_events(tmp_path, "explained")
    assert event["at_step"] == 8
    assert event["figures"] == pytest.approx(figures(result.analysis))
    assert [finding["kind"] for finding in event["findings"]] == [f.kind for f in result.analysis.findings]
    assert is_finished(tmp_path / "journal.jsonl")
    assert [path.name for path in (tmp_path / "timeline").iterdir() if path.name.startswith(".report")] == []
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make setup")
    from tests.support.tensorboard_run import read, series, single

    for name, value in figures(result.analysis).items():
        assert series(tmp_path / "tensorboard", f"report/{name}") == {8: single(value)}
    (text,) = read(tmp_path / "tensorboard").Tensors("report/findings/text_summary")
    assert event["verdict"][0].split(":")[0].encode() in text.tensor_proto.string_val[0]


@pytest.mark.parametrize(
    "broken", ["hvdtrain.timeline.analysis.analyse.analyse", "hvdtrain.timeline.report.page.to_html"]
)
def test_a_failing_report_is_a_warning(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken, lambda *arguments: 1 // 0)
    result = _train(tmp_path)
    assert (result.reason, result.step, result.analysis) == ("finished", 8, None)
    (warning,) = read_events(tmp_path, "warning")
    assert "the analysis of the run failed: ZeroDivisionError" in warning["text"]
    assert not (tmp_path / "timeline" / "report.html").exists()
    assert is_finished(tmp_path / "journal.jsonl")


def test_large_traces_are_left_out_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "horovod-steps-1-on.json").write_text("[" + " " * 2_000_000 + "]")
    monkeypatch.setattr("hvdtrain.training.records.run_report.MOST_BYTES", 1_000_000)
    result = _train(tmp_path)
    notes = result.analysis.notes
    assert any("horovod-steps-1-on.json, 2 MB" in n for n in notes) and not any("spans of rank 0" in n for n in notes)
    monkeypatch.setattr("hvdtrain.training.records.run_report.MOST_BYTES", 1000)
    result = hvdtrain.train({"train": {"steps": 12}, "run_dir": str(tmp_path)}, toy)
    assert result.analysis.budget is not None
    assert any("spans of rank 0 are too large" in note for note in result.analysis.notes)


@pytest.mark.parametrize("what", ["the event", "the trace"])
def test_a_full_disk_costs_one_thing_not_the_run(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, close = Journal.write, SpanTrace.close

    def full_write(self: Journal, record: Mapping[str, Any]) -> None:
        if record.get("event") == "explained":
            raise RunDirectoryError("journal.jsonl cannot be written: no space left")
        write(self, record)

    def full_close(self: SpanTrace) -> None:
        close(self)
        raise OSError(errno.ENOSPC, "a trace cannot be closed: no space left")

    if what == "the event":
        monkeypatch.setattr(Journal, "write", full_write)
    else:
        monkeypatch.setattr(SpanTrace, "close", full_close)
    result = _train(tmp_path)
    assert (result.reason, result.step) == ("finished", 8) and result.analysis is not None
    (warning,) = read_events(tmp_path, "warning")
    assert ("journal" if what == "the event" else "trace of rank 0") in warning["text"]
    assert "no space left" in warning["text"]


def _span_file(folder: Path, rank: int, began: int, spans: int = 3) -> None:
    head = {"name": "clock", "ph": "M", "pid": rank, "args": {"monotonic_us": began}}
    file = TraceFile(folder / f"spans-rank-{rank}.json", [head])
    file.append([{"name": "x", "ph": "X", "pid": rank, "tid": 0, "ts": n, "dur": 1} for n in range(spans)])
    file.close()


def _bring(tmp_path: Path, folders: list[str]) -> None:
    def body(comm: ThreadComm) -> None:
        collect_spans(comm, tmp_path / folders[comm.rank], pytest.fail)

    on_ranks(len(folders), body)


def test_files_that_rank_0_does_not_see_come_to_it_whole(tmp_path: Path) -> None:
    _bring(tmp_path, ["a", "b"])
    assert not (tmp_path / "a").exists(), "ranks without a file are no trouble"
    for rank, folder in enumerate("aabb"):
        _span_file(tmp_path / folder, rank, began=rank)
    _bring(tmp_path, list("aabb"))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"spans-rank-{rank}.json" for rank in range(4)]
    for rank in (2, 3):
        name = f"spans-rank-{rank}.json"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    _bring(tmp_path, list("aabb"))  # what is there is not brought again
    assert len(list((tmp_path / "a").iterdir())) == 4


def test_a_file_of_an_earlier_start_is_no_substitute(tmp_path: Path) -> None:
    _span_file(tmp_path / "a", 0, began=0)
    _span_file(tmp_path / "a", 1, began=1)
    _span_file(tmp_path / "b", 1, began=2)
    _bring(tmp_path, ["a", "b"])
    brought = json.loads((tmp_path / "a" / "spans-rank-1-1.json").read_text())
    assert brought[0]["args"]["monotonic_us"] == 2


def test_a_failed_write_is_reported(tmp_path: Path) -> None:
    _span_file(tmp_path / "b", 1, began=5)
    (tmp_path / "a").write_text("in the way")
    said: list[str] = []
    on_ranks(2, lambda comm: collect_spans(comm, tmp_path / ("a" if comm.rank == 0 else "b"), said.append))
    assert len(said) == 1 and "stays on its host" in said[0]


def test_cut_anywhere_lines_are_whole(tmp_path: Path) -> None:
    _span_file(tmp_path, 0, began=0, spans=20)
    content = (tmp_path / "spans-rank-0.json").read_bytes()
    for most in range(100, len(content) + 2):
        assert len(json.loads(whole_lines(content, most))) >= 1
