"""What allreduces took, of Horovod's own trace."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.timeline.whatif.read_run import read_evidence
from hvdtrain.timeline.whatif.traced_allreduces import read_allreduces
from tests.support.whatif_run import GBIT, run_folder


def _window(path: Path, file: str, factor: float) -> None:
    """A Timeline of two buckets, three times each, as Horovod writes it."""
    events: list[dict[str, object]] = []
    for tensor, (name, count, us) in enumerate((("allreduce.g/0", 1 << 20, 4000), ("allreduce.g/1", 1 << 18, 1000))):
        events.append({"name": "process_name", "ph": "M", "pid": tensor, "args": {"name": name}})
        for turn in range(3):
            start = 100_000 * turn + 20_000 * tensor
            end = start + us * factor
            events += [
                {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": start - 9000, "pid": tensor},
                {"ph": "E", "ts": start - 10, "pid": tensor},
                {"ph": "B", "name": "ALLREDUCE", "ts": start - 5, "pid": tensor},
                {"ph": "B", "name": "MPI_ALLREDUCE", "ts": start, "pid": tensor},
                {"ph": "E", "ts": end, "pid": tensor},
                {"ph": "E", "ts": end + 5, "pid": tensor, "args": {"dtype": "float32", "shape": f"[{count}]"}},
            ]
    (path / "timeline" / file).write_text(json.dumps(sorted(events, key=lambda event: event.get("ts", 0))))


def test_the_newest_window_tells_without_what_was_waited_for_ranks(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", size=2, wait_ms=9.0)
    assert read_allreduces(path) == []
    _window(path, "horovod-steps-10-20.json", 1.0)
    assert read_allreduces(path) == [(1 << 20, 0.001), (1 << 22, 0.004)]
    fitted = read_evidence(path).fitted
    assert "Horovod's Timeline" in fitted.source
    (path / "timeline" / "horovod-steps-30-40.json").write_text("no trace")
    assert read_allreduces(path) == []


def test_a_probe_is_believed_before_it(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "run", size=2, link=GBIT)
    _window(path, "horovod-steps-10-20.json", 1.0)
    assert "probed" in read_evidence(path).fitted.source
