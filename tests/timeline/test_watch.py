"""The command `timeline watch`; the lines that a run prints about itself."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdtrain.cli.timeline import main
from hvdtrain.observe.past_journal import JournalReader
from hvdtrain.observe.step_format import VERSION, BlockLine, ClockLine, StartLine
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.columns import Floats
from hvdtrain.timeline.report.terminal import changed, verdicts
from hvdtrain.timeline.run import load
from hvdtrain.timeline.run_files import RunFiles
from hvdtrain.timeline.steps import StampReader
from hvdtrain.training.records.verdict_watch import VerdictWatch
from tests.support.journals import FakeRun
from tests.support.step_tables import columns_of, noise, run_of, table_of

HOSTS = ["n01", "n02", "n03", "n04"]


def _run(folder: Path, late_ms: float, *, end: str = "finished") -> Path:
    """A run of 4 ranks with stamps and a journal, where n03 is late from step 101 on."""
    work = 100 + noise(np.random.default_rng(0), (4, 240), "gaussian", 1.0)
    work[2, 100:] += late_ms
    table = table_of(work)
    clock = ClockLine([0.0] * 4, [0.0] * 4)
    gpus = [f"GPU-{host}" for host in HOSTS]
    lines: list[Any] = [StartLine(VERSION, 0, 4, 0, HOSTS, ["x"] * 4, 0.0, clock=clock, devices=gpus)]
    for first in range(0, 240, 16):
        some = columns_of(table, np.arange(first, first + 16))
        moments = {name: getattr(some, name).tolist() for name in ("start_us", "ready_us", "released_us", "end_us")}
        parts = {name: values.tolist() for name, values in some.parts_us.items()}
        lines.append(BlockLine(first + 1, **moments, parts_us=parts, facts={}, clock=clock))
    FakeRun(folder).start([1.0] * 240, step_s=0.1, size=4, end=end)
    (folder / "timeline").mkdir()
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    (folder / "timeline" / "steps.jsonl").write_bytes(text)
    return folder


def test_a_finished_run_is_watched_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "a", 20.0)
    assert main(["watch", str(run)]) == 0
    assert "straggler: rank 2 on n03 costs" in capsys.readouterr().out


def test_what_changes_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slow = _run(tmp_path / "a", 0.0, end=""), _run(tmp_path / "b", 20.0)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt
        (slow / "timeline" / "steps.jsonl").replace(run / "timeline" / "steps.jsonl")

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["watch", str(run), "--every_s", "5"]) == 0 and slept == [5.0, 5.0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step time:") and "rank 2 on n03 is slow since step" in lines[-1]


def test_of_a_run_that_grows_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, grown = _run(tmp_path / "whole", 20.0), tmp_path / "grown"
    (grown / "timeline").mkdir(parents=True)
    kept, read = RunFiles(grown, grows=True), Counter[int]()
    for reader in (JournalReader, StampReader):
        plain = reader._add
        monkeypatch.setattr(reader, "_add", lambda me, line, add=plain: (read.update([id(me)]), add(me, line))[1])
    names = ("journal.jsonl", "timeline/steps.jsonl")
    for part in (0.3, 0.55, 0.95, 1.0, 0.5):  # cut within lines; at last, another run begins there
        for name in names:
            step_s = b'"step_s":0.1' if part != 0.5 else b'"step_s":0.2'
            content = (whole / name).read_bytes().replace(b'"step_s":0.1', step_s)
            (grown / name).write_bytes(content[: int(part * len(content))])
        found, fresh = load(grown, files=kept), load(grown, files=RunFiles(grown, grows=True))
        assert found.starts == fresh.starts and found.start is found.starts[-1]
        for name in ("step", "start_us", "ready_us", "end_us", "block"):
            assert np.array_equal(getattr(found.steps, name), getattr(fresh.steps, name)), name
        assert np.array_equal(found.journal.step_ms, fresh.journal.step_ms)
        if part == 1.0:
            lines = sum(len((whole / name).read_bytes().splitlines()) for name in names)
            assert read[id(kept._journal)] + read[id(kept._stamps)] == lines
    calls: list[str] = []
    for more in ("a", "a", "b", "b"):
        kept.unless_changed("x", [grown / names[0]], more, lambda paths, more=more: calls.append(more))
    (grown / names[0]).write_bytes(b"")
    kept.unless_changed("x", [grown / names[0]], "b", lambda paths: calls.append("changed"))
    assert calls == ["a", "b", "changed"]


class Waits(threading.Event):
    """Ends a watch after some looks, without waiting."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.waited_s = looks, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set() or len(self.waited_s) == self.looks:
            return True
        self.waited_s.append(timeout)
        return False


def test_looks_of_one_process_find_what_is_slow_and_one_that_fails_says_nothing(tmp_path: Path) -> None:
    run, slow = _run(tmp_path / "a", 0.0, end=""), _run(tmp_path / "b", 20.0)
    watch = VerdictWatch(run, 1e9, pytest.fail, pytest.fail, pytest.fail, Waits(0))
    watch._thread.join()
    found = [watch._look()]
    program = watch._process
    (slow / "timeline" / "steps.jsonl").replace(run / "timeline" / "steps.jsonl")
    found.append(watch._look())
    assert [list(look["verdicts"]) for look in found] == [[], ["rank 2"]] and watch._process is program
    assert all(0 < look["goodput"] < 1 and look["cpu_s"] > 0 for look in found)
    program.kill()
    assert watch._look() is None and watch._look() == {**found[1], "cpu_s": pytest.approx(0, abs=60)}
    last = watch._process
    watch.run.rename(tmp_path / "c")
    assert watch._look() is None
    watch._stop()
    assert program.returncode is not None and last.returncode is not None


def test_a_verdict_that_stays_is_said_and_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [({"a": "slow"}, 1.0), None, ({"a": "slow"}, 3.0), ({}, 5.0), ({}, 1.0)]
    found = iter([look and {"verdicts": look[0], "goodput": 0.5, "cpu_s": look[1]} for look in looks])

    def look(watch: VerdictWatch) -> dict[str, Any] | None:
        watch.begin_step(240)
        return next(found)

    monkeypatch.setattr(VerdictWatch, "_look", look)
    lines: list[str] = []
    events: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    waits = Waits(len(looks))
    watch = VerdictWatch(tmp_path, 300.0, lines.append, events.append, shown.append, waits)
    watch._thread.join(60)
    assert lines == ["slow", "no longer: slow"]
    assert events == [{"event": "verdict", "at_step": 240, "text": line} for line in lines]
    assert [look["verdicts"] for look in shown] == [{"a": "slow"}, {"a": "slow"}, {}, {}]
    assert waits.waited_s == [300, 300, 300, 300, 500], "1% of a core at most"


def _said(work: Floats) -> dict[str, str]:
    return verdicts(analyse(run_of(table_of(work))))


def test_a_verdict_comes_stays_and_goes() -> None:
    work = 100 + noise(np.random.default_rng(0), (4, 600), "gaussian", 1.0)
    work[1, 200:400] += 21.0
    before, during, later, after = (_said(work[:, :steps]) for steps in (150, 300, 390, 600))
    assert before == {} and after == {}
    assert list(during) == list(later) == ["rank 1"]
    assert during["rank 1"].startswith("rank 1 on host0 is slow since step 2") and "ms per step" in during["rank 1"]
    assert changed(before, during) == [during["rank 1"]] and changed(during, later) == []
    assert changed(later, after) == [f"no longer: {later['rank 1']}"]


def test_expensive_findings_are_verdicts() -> None:
    table = table_of(np.full((2, 60), 100.0), exchange_ms=60.0)
    found = verdicts(analyse(run_of(table)))
    assert list(found) == ["exposed"] and "exposed communication takes" in found["exposed"]
