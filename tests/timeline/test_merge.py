"""One trace of all ranks: by the format's rules, on one clock, in the real Perfetto."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.__main__ import main
from hvdtrain.errors import TraceError
from hvdtrain.spans import EXCHANGE
from hvdtrain.timeline.merge import merge
from hvdtrain.timeline.read import read_horovod
from tests.support.browser import import_errors, perfetto, text, until
from tests.support.gallery import Gallery
from tests.support.trace_format import check_trace

TRACES = Path(__file__).parent / "traces"
FLOWS = ("s", "t", "f")
TOLERANCE_US = 1000.0
"""Of clocks: 60 us were measured."""

Event = dict[str, Any]


@pytest.fixture
def recorded(gallery: Gallery) -> Path:
    """A run of two ranks with spans, a Timeline and profiles."""
    return gallery["two"].run


def load(path: Path) -> list[Event]:
    content = path.read_bytes()
    return list(json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"])


def check(events: list[Event]) -> None:
    """See that the format's rules hold."""
    check_trace(events)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {e["pid"] for e in events} <= processes
    assert all((e["pid"], e["tid"]) in named and e["ts"] >= 0 for e in events if e["ph"] != "M")


def test_all_of_a_run_is_in_it(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.json.gz"
    merged = merge([recorded], out)
    events = load(out)
    check(events)
    assert merged.events == len(events) and merged.nbytes == out.stat().st_size
    assert [spans.rank for spans in merged.spans] == [0, 1] and len(merged.timelines) == 1
    (file,) = (recorded / "timeline").glob("horovod-*.json")
    trace = read_horovod(file)
    spans = [e for e in events if e["ph"] == "X"]
    assert sum("tensor" in e.get("args", {}) for e in spans) == len(trace.start_us)
    for rank in (0, 1):
        own = [e for e in spans if e["pid"] == rank and e["tid"] < 1 << 16]
        written = json.loads((recorded / f"timeline/spans-rank-{rank}.json").read_text())
        assert len(own) == sum(e["ph"] == "X" for e in written)
    assert min(e["ts"] for e in events if e["ph"] != "M") == 0
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert "training thread" in tracks and any(name.startswith("exchange of bucket 0") for name in tracks)
    assert any("torch-steps" in note for note in merged.notes)


def test_a_span_of_two_sources_has_one_time(recorded: Path, tmp_path: Path) -> None:
    merge([recorded], tmp_path / "all.json")
    events = load(tmp_path / "all.json")
    spans = [e for e in events if e["ph"] == "X"]

    ours = np.array([(e["ts"], e["ts"] + e["dur"]) for e in spans if e["pid"] == 0 and e["tid"] == EXCHANGE])
    of_horovod = [e for e in spans if e["name"] == "ALLREDUCE" and e["args"]["tensor"].endswith("gradients/0")]
    theirs = np.array([(e["ts"], e["ts"] + e["dur"]) for e in of_horovod])
    assert len(theirs) == 21
    # Each is within one of ours, which may begin much earlier and end much later where other processes have the cores.
    around = (ours[:, 0] < theirs[:, :1] + TOLERANCE_US) & (ours[:, 1] > theirs[:, 1:] - TOLERANCE_US)
    assert around.any(axis=1).all()
    assert np.abs(ours[around.argmax(axis=1), 1] - theirs[:, 1]).min() < 20 * TOLERANCE_US


@pytest.mark.slow
def test_it_opens_in_perfetto(recorded: Path, tmp_path: Path) -> None:
    merge([recorded], tmp_path / "all.json")
    with perfetto(tmp_path / "all.json", tmp_path) as opened:
        until(opened, lambda: "rank 0 on" in text(opened) and "rank 1 on" in text(opened))
        until(opened, lambda: "Horovod (rank 0)" in text(opened))
        assert import_errors(opened) == []


@pytest.mark.parametrize(
    "names", [["training"], ["window-2", "window-6"], ["collectives", "names"], ["killed"], ["ticks-4-ranks"]]
)
def test_timelines_of_any_program_are_merged(names: list[str], tmp_path: Path) -> None:
    files = [TRACES / f"{name}.json.gz" for name in names]
    merged = merge(files, tmp_path / "all.json")
    events = load(tmp_path / "all.json")
    check(events)
    traces = [read_horovod(file) for file in files]
    assert sum(e["ph"] == "X" for e in events) == sum(len(trace.start_us) for trace in traces)
    assert sum(e["ph"] == "i" for e in events) == sum(len(trace.tick_us) for trace in traces)
    assert len(merged.timelines) == len(files)
    if len(traces) == 2:  # the second begins as much later as it did
        pids = sorted({e["pid"] for e in events})
        firsts = [min(e["ts"] for e in events if e["pid"] == pid and e["ph"] == "X") for pid in pids]
        stamps = [(trace.epoch_us or 0.0) + trace.start_us.min() for trace in traces]
        assert firsts[1] - firsts[0] == pytest.approx(stamps[1] - stamps[0], abs=1.0)


def test_tensors_that_never_meet_share_a_track(tmp_path: Path) -> None:
    turn = '{{"ph": "B", "name": "QUEUE", "ts": {0}00, "pid": {0}}},{{"ph": "E", "ts": {0}50, "pid": {0}}}'
    (tmp_path / "many.json").write_text("[\n" + ",".join(turn.format(n) for n in range(1, 5000)) + "]")
    merge([tmp_path / "many.json"], tmp_path / "all.json")
    events = load(tmp_path / "all.json")
    check(events)
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 1


def test_what_cannot_be_merged_is_an_error(recorded: Path, tmp_path: Path) -> None:
    for sources, out, said in (
        ([tmp_path], "all.json", "no trace"),
        ([recorded, recorded], "all.json", "one run"),
        ([Path(__file__)], "all.json", "not a Timeline"),
        ([TRACES / "names.json.gz"], "none/all.json", "cannot be written"),
    ):
        with pytest.raises(TraceError, match=said):
            merge(sources, tmp_path / out)
    assert list(tmp_path.iterdir()) == []


def test_damaged_spans_cost_what_they_lack(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded / "timeline", tmp_path / "timeline")
    (tmp_path / "timeline/spans-rank-1.json").write_text("[{")
    assert [spans.rank for spans in merge([tmp_path], tmp_path / "all.json").spans] == [0]
    check(load(tmp_path / "all.json"))


def test_the_command_says_what_it_wrote(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "merge", str(recorded), "-o", str(tmp_path / "all.json.gz")]) == 0
    assert "2 ranks, 1 Horovod Timeline, " in capsys.readouterr().out
    assert (tmp_path / "all.json.gz").stat().st_size
