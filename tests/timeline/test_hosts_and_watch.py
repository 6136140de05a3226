"""Which hosts slowed jobs; the commands `timeline hosts` and `watch`; the lines that a run prints about itself."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from hvdtrain.cli.timeline import main, watch
from hvdtrain.cli.timeline.hosts import _lines
from hvdtrain.observe.past_journal import JournalReader
from hvdtrain.observe.step_format import VERSION, BlockLine, ClockLine, StartLine
from hvdtrain.timeline.analysis.analyse import analyse
from hvdtrain.timeline.analysis.slow_hosts import slow_hosts
from hvdtrain.timeline.columns import Floats, StampedStart, StepTable
from hvdtrain.timeline.report.terminal import changed, verdicts
from hvdtrain.timeline.run import load
from hvdtrain.timeline.run_files import RunFiles
from hvdtrain.timeline.steps import StampReader
from hvdtrain.training.records.verdict_watch import VerdictWatch
from tests.support.journals import BEGIN_S, FakeRun
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
    first = found["hosts"][0]
    assert first["name"] == "n03" and found["groups"] == []
    assert first["slow_since"] == pytest.approx(BEGIN_S + 10, abs=1) and first["last_slow"] == first["last_seen"]


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, racks, missing = str(_run(tmp_path / "a", 0.0)), tmp_path / "racks", tmp_path / "none"
    racks.write_text("n03\n")
    for argv, code, said in (
        ([str(tmp_path)], 1, "no step stamps"),
        ([run, "--groups", str(racks)], 2, "line 1 of"),
        ([run, "--groups", str(missing)], 2, f"{missing} cannot be read"),
    ):
        assert main(["hosts", *argv]) == code
        assert said in capsys.readouterr().err


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

    # Threads of others sleep as ever.
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep, process_time=time.process_time))
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


def _start(seed: int, late: dict[int, float], hosts: list[str], steps: int = 200) -> StepTable:
    work = 100 + noise(np.random.default_rng(seed), (len(hosts), steps), "gaussian", 1.0)
    for rank, ms in late.items():
        work[rank] += ms
    return replace(table_of(work), hosts=hosts, devices=[f"GPU-{host}" for host in hosts])


def test_hosts_are_kept_over_starts_in_which_ranks_move() -> None:
    starts = [
        _start(0, {2: 20.0}, ["a", "b", "c", "d"]),
        _start(1, {0: 20.0}, ["c", "a", "b", "d"]),
        _start(2, {}, ["a", "b", "d", "e"]),
        _start(3, {3: 10.0}, ["a", "b", "c", "d"]),
        _start(4, {0: 50.0}, ["a", "b"], steps=5),  # too short to judge
    ]
    stamped = [StampedStart(start, epoch_s=1e9 * (1 + number)) for number, start in enumerate(starts)]
    found = slow_hosts(stamped[::-1], {"c": "rack 1", "d": "rack 1", "a": "rack 2"})
    first, second = found["hosts"][:2]
    assert (first.name, first.slow_starts, first.starts) == ("c", 2, 3)
    assert first.device_hours == pytest.approx(2 * 0.9 * 0.02 * 200 * 4 / 3600, rel=0.2)
    assert (second.name, second.slow_starts, second.starts) == ("d", 1, 4)
    assert [place.name for place in found["hosts"][2:]] == ["a", "b", "e"]
    assert [place.name for place in found["devices"][:2]] == ["GPU-c", "GPU-d"] and found["devices"][0].host == "c"
    assert [(place.name, place.slow_starts) for place in found["groups"]] == [("rack 1", 3), ("rack 2", 0)]
    assert first.causes.most_common(1)[0][0] in ("forward", "backward")
    assert 0 < first.device_hours_low < first.device_hours < first.device_hours_high < 2 * first.device_hours
    assert first.device_hours_per_day == pytest.approx(4 * 24 * 0.02 / 0.121, rel=0.1)
    assert (first.slow_now, first.slow_since) == (False, None) and second.slow_now
    assert [place.last_seen for place in found["hosts"][:2]] == [stamped[3].time_s(-1), stamped[3].time_s(-1)]
    assert (first.last_slow, second.last_slow) == (stamped[1].time_s(-1), stamped[3].time_s(-1))
    (still, *_) = slow_hosts(stamped[:2], {})["hosts"]
    assert still.slow_now and still.slow_since == pytest.approx(1e9 + 5e3, abs=5), "since the first of both"


@pytest.mark.parametrize(("since", "until"), [(100, 200), (50, 120)])
def test_a_host_is_slow_since_its_ranks_became_late(since: int, until: int) -> None:
    work = 100 + noise(np.random.default_rng(0), (4, 200), "gaussian", 1.0)
    work[2, since:until] += 20.0
    start = StampedStart(replace(table_of(work), hosts=["a", "b", "c", "d"]), epoch_s=1e9)
    earlier = StampedStart(_start(0, {2: 20.0}, ["a", "b", "c", "d"]), epoch_s=1e8)  # it was slow to its end
    (first, *_) = slow_hosts([earlier, start], {})["hosts"]
    assert (first.name, first.slow_now) == ("c", until == 200)
    assert first.last_slow == pytest.approx(start.time_s(until - 1), abs=1)
    assert first.slow_since == (pytest.approx(start.time_s(since), abs=1) if until == 200 else None)


def test_a_host_with_wrong_bits_is_named_first() -> None:
    events = [{"event": "wrong_rank", "at_step": step, "rank": rank} for step, rank in ((3, 1), (9, 1), (9, None))]
    stamped = [StampedStart(_start(0, {2: 20.0}, ["a", "b", "c"]), wrong=events)]
    places = slow_hosts(stamped, {})["hosts"]
    assert {place.name: place.wrong_bits for place in places} == {"a": 0, "b": 2, "c": 0}
    first, second, *_ = _lines("hosts", places)
    assert "wrong bits" in first and "b (2)" in first and "hosts, by" in second


@pytest.mark.parametrize("balanced", [False, True])
def test_a_host_with_fewer_micro_batches_is_judged_by_what_is_left(balanced: bool) -> None:
    """It was slow until step 100; since then it has half of the micro-batches, and is later by less than one."""
    work = 100 + noise(np.random.default_rng(0), (4, 200), "gaussian", 1.0)
    work[2, :100] += 100.0
    work[2, 100:] += 5.0
    table = replace(table_of(work), hosts=["a", "b", "c", "d"])
    event = {"event": "shares", "at_step": 100, "shares": [2, 2, 1, 2], "pass_s": [0.05, 0.05, 0.1, 0.05]}
    (first, *_) = slow_hosts([StampedStart(table, [event] if balanced else [])], {})["hosts"]
    assert (first.slow_starts, first.name) == ((0, "a") if balanced else (1, "c"))
