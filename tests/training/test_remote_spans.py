"""Span files of ranks that do not see rank 0's folder, as threads with folders of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.observe.trace_file import TraceFile
from hvdtrain.training.records import run_report as far_files
from hvdtrain.training.records.run_report import collect_spans, whole_lines
from tests.support.thread_comm import ThreadComm, on_ranks


def _trace(folder: Path, rank: int, began: int, spans: int = 3) -> None:
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
        _trace(tmp_path / folder, rank, began=rank)
    _bring(tmp_path, list("aabb"))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"spans-rank-{rank}.json" for rank in range(4)]
    for rank in (2, 3):
        name = f"spans-rank-{rank}.json"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    _bring(tmp_path, list("aabb"))  # what is there is not brought again
    assert len(list((tmp_path / "a").iterdir())) == 4


def test_a_file_of_an_earlier_start_is_no_substitute(tmp_path: Path) -> None:
    _trace(tmp_path / "a", 0, began=0)
    _trace(tmp_path / "a", 1, began=1)
    _trace(tmp_path / "b", 1, began=2)
    _bring(tmp_path, ["a", "b"])
    brought = json.loads((tmp_path / "a" / "spans-rank-1-1.json").read_text())
    assert brought[0]["args"]["monotonic_us"] == 2


def test_long_files_are_cut_between_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trace(tmp_path / "b", 1, began=5, spans=500)
    monkeypatch.setattr(far_files, "_SPANS_BYTES", 1000)
    _bring(tmp_path, ["a", "b"])
    events = json.loads((tmp_path / "a" / "spans-rank-1.json").read_text())
    assert 5 < len(events) < 20 and [event["ts"] for event in events[1:]] == list(range(len(events) - 1))


def test_a_failed_write_is_reported(tmp_path: Path) -> None:
    _trace(tmp_path / "b", 1, began=5)
    (tmp_path / "a").write_text("in the way")
    said: list[str] = []
    on_ranks(2, lambda comm: collect_spans(comm, tmp_path / ("a" if comm.rank == 0 else "b"), said.append))
    assert len(said) == 1 and "stays on its host" in said[0]


def test_cut_anywhere_lines_are_whole(tmp_path: Path) -> None:
    _trace(tmp_path, 0, began=0, spans=20)
    content = (tmp_path / "spans-rank-0.json").read_bytes()
    for most in range(100, len(content) + 2):
        assert len(json.loads(whole_lines(content, most))) >= 1
