"""The end of a run says where the time went; nothing that fails there fails the run."""

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
from hvdtrain.observe.span_trace import SpanTrace
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.timeline.analysis.analysis import figures
from hvdtrain.training.records.run_report import wait_for_spans
from tests.support.journals import read_events
from tests.support.thread_comm import on_ranks
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


def test_spans_that_rank_0_does_not_see_are_a_warning(tmp_path: Path) -> None:
    for rank, host in enumerate("aabb"):
        path = TimelineLayout(tmp_path / host).spans(rank)
        path.parent.mkdir(exist_ok=True)
        path.touch()
    said: list[str] = []
    on_ranks(5, lambda comm: wait_for_spans(comm, TimelineLayout(tmp_path / "aabbb"[comm.rank]), said.append))
    (warning,) = said
    assert "rank(s) 2, 3 are on other hosts" in warning and "hvdtrain timeline report" in warning
