"""The traces in the reader that people use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hvdtrain
from tests.support.browser import import_errors, perfetto, text, until
from tests.support.toy import toy

pytestmark = pytest.mark.slow


def test_perfetto_reads_the_spans_of_a_run(tmp_path: Path) -> None:
    hvdtrain.train({"train": {"steps": 6}, "run_dir": str(tmp_path / "run")}, toy)
    with perfetto(tmp_path / "run" / "timeline" / "spans-rank-0.json", tmp_path) as opened:
        until(opened, lambda: "rank 0 on" in text(opened))
        until(opened, lambda: "training thread" in text(opened))
        assert import_errors(opened) == []
    bad, span = tmp_path / "bad.json", {"name": "a", "ph": "X", "pid": 0, "tid": 0}
    bad.write_text(json.dumps([{**span, "ts": 0, "dur": 10}, {**span, "ts": 5, "dur": 10}, {**span, "ts": "x"}]))
    with perfetto(bad, tmp_path) as opened:
        assert import_errors(opened) != [], "it says what is wrong"
