from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
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


def test_everything_is_closed_whatever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_CLOSE_TIMEOUT_S", TIMEOUT_S)
    recorder, _ = _recorder(tmp_path / "journal")
    taken: list[Mapping[str, Any]] = []
    closed: list[str] = []

    def watch(name: str) -> Any:
        def close() -> None:
            closed.append(name)
            if name == "second":
                raise OSError("disk full")

        return SimpleNamespace(close=close)

    for name in ("first", "second", "third"):
        recorder.add_watcher(watch(name))
    recorder.add_sink(lambda: SimpleNamespace(write=taken.append, close=lambda: closed.append("sink")), "mine")
    recorder.event({"event": "started"})
    with pytest.raises(OSError, match="disk full"):
        recorder.close()
    assert sorted(closed) == ["first", "second", "sink", "third"]
    assert [record["event"] for record in taken] == ["started"]
    recorder.warn("a sink that was left behind speaks")
    assert [line["event"] for line in read_journal(tmp_path / "journal")] == ["started"]


def test_nothing_raises_on_a_full_disk() -> None:
    recorder, shown = _recorder(Path("/dev/full"))
    recorder.event({"event": "started"})
    recorder.warn("the trace ends here")
    assert "warning: the trace ends here" in shown.getvalue()
    recorder.close()
