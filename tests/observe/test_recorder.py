from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.observe import recorder as recorder_module
from hvdtrain.observe.journal import Journal
from hvdtrain.observe.past_journal import read_journal
from hvdtrain.observe.progress import Progress
from hvdtrain.observe.recorder import Recorder
from tests.support.launch import TIMEOUT_S


def _recorder(journal: Path) -> tuple[Recorder, io.StringIO]:
    shown = io.StringIO()
    return Recorder(Journal(journal, print), Progress("samples", 0.0, live=False, out=shown)), shown


class Watcher:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.closed = False

    def begin_step(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        if self.error is not None:
            raise self.error


def test_everything_is_closed_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_CLOSE_TIMEOUT_S", TIMEOUT_S)
    recorder, _ = _recorder(tmp_path / "journal")
    watchers = [Watcher(), Watcher(OSError("disk full")), Watcher()]
    taken: list[Mapping[str, Any]] = []

    class Sink:
        def write(self, record: Mapping[str, Any]) -> None:
            taken.append(record)

        def close(self) -> None:
            taken.append({"closed": True})

    for watcher in watchers:
        recorder.add_watcher(watcher)
    recorder.add_sink(Sink, "mine")
    recorder.event({"event": "started"})
    with pytest.raises(OSError, match="disk full"):
        recorder.close()
    assert all(watcher.closed for watcher in watchers)
    assert [record.get("event", "closed") for record in taken] == ["started", "closed"]
    recorder.warn("a sink that was left behind speaks")
    assert [line["event"] for line in read_journal(tmp_path / "journal")] == ["started"]


def test_nothing_raises_on_a_full_disk() -> None:
    recorder, shown = _recorder(Path("/dev/full"))
    recorder.event({"event": "started"})
    recorder.warn("the trace ends here")
    assert "warning: the trace ends here" in shown.getvalue()
    recorder.close()
