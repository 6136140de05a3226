"""The commands `hvdtrain timeline hosts` and `watch`, and the lines that a run prints about itself."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdtrain.cli.timeline import main
from hvdtrain.observe.step_format import VERSION, BlockLine, ClockLine, StartLine
from hvdtrain.training.records.verdict_watch import VerdictWatch
from tests.support.journals import FakeRun
from tests.support.step_tables import noise, table_of

HOSTS = ["n01", "n02", "n03", "n04"]


def _run(folder: Path, late_ms: float, *, end: str = "finished") -> Path:
    """A run of 4 ranks with stamps and a journal, where n03 is late from step 101 on."""
    work = 100 + noise(np.random.default_rng(0), (4, 240), "gaussian", 1.0)
    work[2, 100:] += late_ms
    table = table_of(work)
    clock = ClockLine([0.0] * 4, [0.0] * 4)
    lines: list[Any] = [
        StartLine(VERSION, 0, 4, 0, HOSTS, ["x"] * 4, 0.0, clock=clock, devices=[f"GPU-{host}" for host in HOSTS])
    ]
    for first in range(0, 240, 16):
        mine = np.s_[:, first : first + 16]
        moments = [getattr(table, f"{name}_us")[mine].tolist() for name in ("start", "ready", "released", "end")]
        parts = {name: values[mine].tolist() for name, values in table.parts_us.items()}
        lines.append(BlockLine(first + 1, moments[0], moments[1], moments[2], moments[3], parts, {}, clock))
    FakeRun(folder).start([1.0] * 240, step_s=0.1, size=4, end=end)
    (folder / "timeline").mkdir()
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / "timeline" / "steps.jsonl").write_bytes(text)
    return folder


def test_hosts_and_gpus_are_named_over_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [_run(tmp_path / name, ms) for name, ms in (("a", 20.0), ("b", 0.0))]
    racks = tmp_path / "racks.txt"
    racks.write_text("n03 r1\nn04 r1\nn01 r2\n")
    assert main(["hosts", *map(str, runs), "--groups", str(racks)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "hosts, by the device-hours that jobs waited for them:"
    assert lines[1].startswith("n03 0.00") and "slow in 1 of 2 starts" in lines[1]
    assert lines[3].startswith("GPU-n03 on n03 ") and lines[5].startswith("r1 ")
    assert main(["hosts", *map(str, runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"][0]["name"] == "n03" and found["groups"] == []


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, racks = str(_run(tmp_path / "a", 0.0)), tmp_path / "racks.txt"
    racks.write_text("n03\n")
    for argv, code, text in (
        ([str(tmp_path)], 1, "there are no step stamps in"),
        ([run, "--groups", str(racks)], 2, "line 1 of"),
        ([run, "--groups", str(tmp_path / "none")], 2, "none cannot be read: No such file"),
    ):
        assert main(["hosts", *argv]) == code
        assert text in capsys.readouterr().err


def test_a_finished_run_is_watched_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "a", 20.0)
    assert main(["watch", str(run)]) == 0
    assert "straggler: rank 2 on n03 costs" in capsys.readouterr().out


def test_what_changes_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path / "a", 0.0, end="")
    states = iter(["slow", "stop"])

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        if next(states) == "stop":
            raise KeyboardInterrupt
        slow = _run(tmp_path / "b", 20.0)
        (run / "timeline" / "steps.jsonl").write_bytes((slow / "timeline" / "steps.jsonl").read_bytes())

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["watch", str(run), "--every_s", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step time:") and "rank 2 on n03 is slow since step" in lines[-1]


def test_a_run_says_what_becomes_slow(tmp_path: Path) -> None:
    run = _run(tmp_path / "a", 20.0, end="")
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    watch = VerdictWatch(run, 0.1, lines.append, events.append)
    watch.begin_step(240)
    deadline = time.monotonic() + 60
    while not events and time.monotonic() < deadline:
        time.sleep(0.05)
    watch.close()
    assert len(lines) == 1 and lines[0].startswith("rank 2 on n03 is slow since step")
    assert events == [{"event": "verdict", "at_step": 240, "text": lines[0]}]


def test_a_verdict_that_stays_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"a": "slow"}, {"a": "slow"}, {}, {}])
    looked = threading.Event()

    def look(watch: VerdictWatch) -> dict[str, str] | None:
        state = next(found, None)
        if state is None:
            looked.set()
        return state

    monkeypatch.setattr(VerdictWatch, "_look", look)
    lines: list[str] = []
    watch = VerdictWatch(tmp_path, 0.01, lines.append, lambda record: None)
    assert looked.wait(10)
    watch.close()
    assert lines == ["slow", "no longer: slow"]


def test_a_look_that_fails_says_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    watch = VerdictWatch(tmp_path, 1e9, lines.append, pytest.fail)
    assert watch._look() is None and not lines
    watch.close()
