"""What a journal tells of the run so far: of steps that were done again, the last."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.observe.past_journal import PastSteps, read_journal_starts, sampled_steps, skipped_steps
from tests.support.tensorboard_run import BATCH, Run


def test_a_run_that_began_from_another_ones_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(500, [1.0] * 3)
    past = PastSteps(run.journal).read()
    assert (past.seconds[503], past.positions[503]) == (3.0, 503 * BATCH)


def test_seconds_and_positions_leave_out_what_was_done_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(None, [1.0] * 10)
    run.stretch(6, [0.25] * 4)
    with run.journal.open("ab") as file:
        file.write(b'{"step":11,"step_s"')  # a kill
    past = PastSteps(run.journal).read()
    assert list(past.seconds) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 6.25, 6.5, 6.75, 7.0]
    assert past.positions[10] == 10 * BATCH
    assert 10 in past and 11 not in past
    missing = PastSteps(tmp_path / "missing").read()
    assert 0 in missing and 1 not in missing


def test_steps_and_events_after_a_step_in_order(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(None, [1.0] * 10, save_every=5)
    run.stretch(5, [2.0] * 6, save_every=5)
    past = PastSteps(run.journal).read()
    assert past.step_before(11, 5.0) == 8
    assert past.step_before(11, 1000.0) == 0
    found = [(r.get("event"), r.get("step", r.get("at_step"))) for r in past.records_after(8, 10)]
    assert found == [(None, 9), (None, 10), ("checkpoint", 10), ("evaluation", 10)]
    assert [r["step_s"] for r in past.records_after(0, 11) if "event" not in r] == [1.0] * 5 + [2.0] * 6


def test_a_clock_that_was_set_between_two_starts_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.stretch(None, [1.0] * 10)
    expected = PastSteps(run.journal).read().step_before(10, 5.0)
    for jump_s in (-7200.0, 7200.0):
        lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
        for line in lines:
            line["time"] += jump_s * (line.get("step", 0) > 8)
        run.journal.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        assert PastSteps(run.journal).read().step_before(10, 5.0) == expected == 4


def test_steps_of_a_start_are_sampled_evenly(tmp_path: Path) -> None:
    path, lines = tmp_path / "journal.jsonl", []
    for start, steps in ((0, range(1, 21)), (1, range(11, 1011))):
        lines.append({"event": "started", "start": start})
        for step in steps:
            lines.append({"step": step, "step_s": step / 10, "at": start})
            lines += [{"event": "evaluation", "at_step": step}] if step % 10 == 0 else []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step":1011,"st')
    first, second = read_journal_starts(path)
    assert [line["step"] for line in sampled_steps(path, first, 100)] == list(range(1, 21))
    found = sampled_steps(path, second, 100)
    assert [line["step"] for line in found] == list(range(11, 1011, 10)) and {line["at"] for line in found} == {1}


def test_starts_have_the_durations_of_steps_and_those_that_changed_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines: list[dict[str, object]] = [{"event": "started", "time": 1.0}]
    lines += [
        {"step": step, "time": 10.0 + step, "step_s": step / 4, "skipped": step in (2, 3)} for step in range(1, 5)
    ]
    lines += [{"event": "started", "time": 20.0}, {"step": 3, "time": 21.0, "step_s": 0.5, "skipped": False}]
    lines += [{"step": 4, "time": 23.0, "step_s": "x", "skipped": True}, {"step": 5, "time": 24.0}]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    first, second = read_journal_starts(path)
    assert first.steps.tolist() == [1, 2, 3, 4] and first.seconds.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert first.skipped == [1, 2] and first.first_times == [11.0, 12.0, 13.0, 14.0] and first.last_step_time == 14.0
    assert second.steps.tolist() == [3, 4, 5] and second.seconds.tolist() == [0.5, 0.0, 0.0]
    assert skipped_steps([first, second]) == {2, 4} and skipped_steps([first]) == {2, 3}
