"""`verify data` says right of any run that lost nothing, and finds any single thing that is wrong."""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hvdtrain.data.loader import Stream
from hvdtrain.data.order import SampleOrder
from hvdtrain.errors import RunDirectoryError
from hvdtrain.run_layout import RunLayout
from hvdtrain.state.ledger import Ledger, StartHeader, ledger_file_name
from hvdtrain.verify import epochs
from hvdtrain.verify.data import to_text, verify_data


@pytest.fixture(autouse=True, scope="module")
def _in_parts() -> Iterator[None]:
    """Read two steps at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "_POSITIONS_AT_ONCE", 8)
        yield


@dataclass(frozen=True)
class Stretch:
    """A start, and what became of it."""

    back: int = 0  # steps before the last one from which it resumes
    size: int = 1
    steps: int = 3  # that all ranks recorded
    ahead: int = 0  # ranks that recorded one step more; all but one at most
    torn: int = 0  # bytes lost of the last line of rank 0
    global_batch: int = 4
    goes_past: bool = False  # a roll-back: its first step leaves out the positions that it had before


@dataclass
class Written:
    run: Path
    counted: dict[int, int] = field(default_factory=dict)  # by step, the start whose lines count
    taken: list[int] = field(default_factory=list)  # positions that count, in order
    positions: list[int] = field(default_factory=lambda: [0])  # by step, the position behind it


def write_ledger(
    run: Path, stretches: Sequence[Stretch], *, length: int, sources: Sequence[Sequence[int]] = ()
) -> Written:
    """Write the ledger of these starts, a journal, and a checkpoint of the last step that all ranks tell of."""
    done = Written(run)
    left_out: list[list[int]] = []
    run.mkdir(parents=True, exist_ok=True)
    journal: list[dict[str, object]] = []
    by_step: dict[int, list[int]] = {}
    for number, stretch in enumerate(stretches):
        first = max(0, len(done.positions) - 1 - stretch.back)
        position = done.positions[first]
        del done.positions[first + 1 :]
        if stretch.goes_past:
            kept = [hole for hole in left_out if hole[1] <= position]
            left_out = [*kept, [position, position + stretch.global_batch]]
            journal.append({"event": "rolled_back", "positions": left_out[-1]})
        else:
            journal.append({"event": "started"})
        head = StartHeader(
            number, "started", first, position, stretch.size, 0, "here", 3, stretch.global_batch, 2,
            length, "data", left_out, [list(source) for source in sources],
        )  # fmt: skip
        for rank in range(stretch.size):
            _write_rank(run, replace(head, rank=rank), stretch)
        stream = Stream([], 3, stretch.global_batch, 2, 0, 1, left_out)
        for step in range(first + 1, first + stretch.steps + 1):
            by_step[step] = [p for part in stream.step(position) for p in range(part.start, part.stop)]
            position = stream.position_after(position)
            done.positions.append(position)
            done.counted[step] = number
    last = len(done.positions) - 1
    done.taken = [p for step in range(1, last + 1) for p in by_step[step]]
    done.counted = {step: number for step, number in done.counted.items() if step <= last}
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    (run / "checkpoints" / f"step-{last:06d}").mkdir(parents=True)
    return done


def _write_rank(run: Path, head: StartHeader, stretch: Stretch) -> None:
    is_ahead = head.rank < min(stretch.ahead, stretch.size - 1)
    ledger = Ledger(RunLayout(run).ledger, print)
    ledger.begin_start(head)
    stream = Stream([], head.seed, head.global_batch, head.micro_batch, head.rank, head.size, head.left_out)
    position = head.position
    for step in range(head.from_step + 1, head.from_step + stretch.steps + is_ahead + 1):
        for part in stream.step(position):
            order = SampleOrder(head.samples, head.sources, head.seed)
            indices = order.indices(np.arange(part.start, part.stop))
            ledger.add_samples(part.start, part.stop, array("q", indices.tolist()).tobytes())
        ledger.write(step)
        position = stream.position_after(position)
    ledger.close()
    if is_ahead and stretch.torn:
        path = _file(run)
        path.write_bytes(path.read_bytes()[: -stretch.torn])


STRETCHES = st.lists(
    st.builds(
        Stretch,
        back=st.integers(0, 6),
        size=st.integers(1, 4),
        steps=st.integers(0, 7),
        ahead=st.integers(0, 4),
        torn=st.integers(0, 8),
        global_batch=st.integers(1, 9),
        goes_past=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
SKIPPED = Stretch(steps=0, global_batch=1, goes_past=True)
TWO = [Stretch(size=2, steps=9, global_batch=6), Stretch(back=3, size=3, steps=8, global_batch=6)]


@contextmanager
def _written(stretches: list[Stretch], length: int = 20, sources: Sequence[Sequence[int]] = ()) -> Iterator[Written]:
    folder = tempfile.mkdtemp()
    try:
        yield write_ledger(Path(folder) / "run", stretches, length=length, sources=sources)
    finally:
        shutil.rmtree(folder)


def _file(run: Path) -> Path:
    return RunLayout(run).ledger / ledger_file_name()


def _start_and_rank(line: bytes) -> list[int]:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return []  # cut off
    return [found["start"], found["rank"]] if isinstance(found, dict) else found[:2]


def _edit(run: Path, start: int, rank: int, change: Callable[[list[Any]], None]) -> None:
    """Change the header and the lines of a start of a rank; lines are given without both."""
    lines = _file(run).read_bytes().split(b"\n")[1:]
    own = [orjson.loads(line) for line in lines if _start_and_rank(line) == [start, rank]]
    own[1:] = [line[2:] for line in own[1:]]
    change(own)
    own[1:] = [[start, rank, *line] for line in own[1:]]
    others = [line for line in lines if _start_and_rank(line) != [start, rank]]
    _file(run).write_bytes(b"".join(b"\n" + line for line in [*others, *map(orjson.dumps, own)]))


def _remove(run: Path, start: int) -> None:
    lines = _file(run).read_bytes().split(b"\n")[1:]
    _file(run).write_bytes(b"".join(b"\n" + line for line in lines if _start_and_rank(line)[:1] != [start]))


@settings(max_examples=60, deadline=None)
@given(STRETCHES, st.integers(1, 30))
def test_whatever_was_killed_resized_and_rolled_back_is_right(stretches: list[Stretch], length: int) -> None:
    with _written(stretches, length) as done:
        report = verify_data(done.run)
        assert report.wrong == []
        assert (report.last, report.end) == (len(done.positions) - 1, done.positions[-1])
        left_out = [p for begin, end in report.left_out for p in range(begin, end)]
        assert sorted(done.taken + left_out) == list(range(report.end))
        taken = Counter(p // length for p in done.taken)
        assert report.epochs.whole == sum(count == length for count in taken.values())
        assert {e.number: e.distinct for e in report.epochs.others} == {e: n for e, n in taken.items() if n != length}
        assert "WRONG" not in to_text(report, done.run)


@settings(max_examples=30, deadline=None)
@given(STRETCHES, st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=2, max_size=3))
@example(
    [SKIPPED, Stretch(steps=2, global_batch=3), SKIPPED, Stretch(back=1, steps=1, global_batch=1)],
    [(1, 1), (1, 1), (2, 2)],
)
def test_epochs_of_sources_with_weights_are_counted_for_each(
    stretches: list[Stretch], sources: list[tuple[int, int]]
) -> None:
    length = sum(size for size, _ in sources)
    with _written(stretches, length, sources) as done:
        report = verify_data(done.run)
        assert report.wrong == []
        order = SampleOrder(length, sources, 3)

        def by_epoch(positions: list[int]) -> Counter[tuple[int, int]]:
            pairs = zip(*order.split(np.array(positions, np.int64)), strict=True)
            return Counter((int(source) + 1, int(rank) // sources[source][0]) for source, rank in pairs)

        taken = by_epoch(done.taken)
        skipped = by_epoch([p for begin, end in report.left_out for p in range(begin, end)])
        open_or_holed = {key: count for key, count in taken.items() if count != sources[key[0] - 1][0]}
        assert report.epochs.whole == len(taken) - len(open_or_holed)
        assert {(e.source, e.number): e.distinct for e in report.epochs.others} == open_or_holed
        assert all(e.left_out == skipped[e.source, e.number] for e in report.epochs.others)
        assert "WRONG" not in to_text(report, done.run)


CORRUPTIONS: dict[str, Callable[[list[Any], int, int], None]] = {
    "a line is missing": lambda lines, at, by: lines.__delitem__(at),
    "a line stands twice": lambda lines, at, by: lines.insert(at, lines[at]),
    "another step": lambda lines, at, by: lines[at].__setitem__(0, lines[at][0] + by),
    "another checksum": lambda lines, at, by: lines[at].__setitem__(2, lines[at][2] ^ by),
    "a range begins elsewhere": lambda lines, at, by: _moved(lines[at], 0, by),
    "a range ends elsewhere": lambda lines, at, by: _moved(lines[at], 1, by),
    "a range more": lambda lines, at, by: lines[at][1].append([by, by + 1]),
    "another seed": lambda lines, at, by: _add(lines, "seed", by),
    "another position": lambda lines, at, by: _add(lines, "position", by),
    "another size of an epoch": lambda lines, at, by: lines[0].__setitem__("samples", lines[0]["samples"] << by),
    "sources with weights": lambda lines, at, by: lines[0].__setitem__("sources", [[10**6, by], [3, by + 1]]),
    "another global batch": lambda lines, at, by: _add(lines, "global_batch", by),
    "what nobody left out": lambda lines, at, by: _left_out(lines, at),
}


def _left_out(lines: list[Any], at: int) -> None:
    assume(lines[at][1])
    begin = lines[at][1][0][0]
    lines[0]["left_out"] = [[begin, begin + 1]]


def _add(lines: list[Any], name: str, by: int) -> None:
    lines[0][name] += by


def _moved(line: list[Any], side: int, by: int) -> None:
    if line[1]:
        line[1][0][side] += by
    else:
        line[1].append([by, by + 1])


@pytest.mark.parametrize("how", CORRUPTIONS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), stretches=STRETCHES, by=st.integers(1, 5))
@pytest.mark.some(5)
def test_any_single_thing_that_is_wrong_is_found(
    how: str, data: st.DataObject, stretches: list[Stretch], by: int
) -> None:
    stretches = [Stretch(steps=4, size=2), *stretches, Stretch(steps=3, size=2)]
    with _written(stretches, length=1_000_003) as done:  # two orders hardly ever begin alike
        step = data.draw(st.sampled_from(sorted(done.counted)))
        start = done.counted[step]
        rank = data.draw(st.integers(0, stretches[start].size - 1))

        def change(lines: list[Any]) -> None:
            at = next(number for number, line in enumerate(lines) if number and line[0] == step)
            CORRUPTIONS[how](lines, at, by)

        _edit(done.run, start, rank, change)
        report = verify_data(done.run)
        assert report.wrong, how
        assert "WRONG" in to_text(report, done.run)


@pytest.mark.parametrize(
    ("change", "step", "words"),
    [
        (lambda run: _edit(run, 0, 1, lambda lines: lines[4][1][0].__setitem__(0, 23)), 4, "rank 1 [23, 24)"),
        (lambda run: _edit(run, 0, 1, lambda lines: lines[4][1][0].__setitem__(0, 23)), 4, "22 not used"),
        (lambda run: _edit(run, 1, 2, lambda lines: lines.clear()), 7, "rank(s) 2 of 3"),
        (lambda run: _remove(run, 1), 10, "no line of start(s) 1"),
        (lambda run: _edit(run, 2, 0, lambda lines: lines.pop()), 16, ""),  # less than a checkpoint holds
    ],
)
def test_the_first_wrong_step_is_named(change: Callable[[Path], Any], step: int, words: str) -> None:
    with _written([*TWO, Stretch(size=1, steps=2, global_batch=6)]) as done:
        assert "every sample exactly once, and no rank" in to_text(verify_data(done.run), done.run)
        change(done.run)
        report = verify_data(done.run)
    assert [wrong.step for wrong in report.wrong] == [step]
    assert words in "\n".join([report.wrong[0].text, *report.notes])


def test_lines_that_are_cut_off_may_be_of_a_kill_or_of_a_full_disk() -> None:
    with _written([Stretch(size=2, steps=3, ahead=1, torn=4)]) as done:
        report = verify_data(done.run)
    assert report.wrong == [] and sum("a full disk" in note for note in report.notes) == 1


def test_steps_without_a_checkpoint_are_not_durable_yet() -> None:
    with _written(TWO) as done:
        (saved,) = (done.run / "checkpoints").iterdir()
        saved.rename(saved.with_name("step-000011"))
        _edit(done.run, 1, 0, lambda lines: lines.pop())  # killed before its last line
        report = verify_data(done.run)
        text = to_text(report, done.run)
    assert report.wrong == []
    assert "steps 12 to 13 are not in a checkpoint yet" in text and "recorded steps 14 to 14 yet" in text


def test_other_data_from_some_step_on_begins_another_order() -> None:
    with _written([Stretch(steps=6)]) as done:  # 24 positions of epochs of 20
        more = write_ledger(done.run.with_name("other"), [Stretch(steps=6), Stretch(steps=6)], length=30)
        _remove(more.run, 0)
        _file(more.run).rename(_file(done.run).with_name("another-host.jsonl"))
        (done.run / "checkpoints" / "step-000012").mkdir()
        report, text = verify_data(done.run), to_text(verify_data(done.run), done.run)
    assert report.wrong == []
    assert "every sample exactly once within each order" in text and "changed once" in text
    assert [(e.number, e.samples, e.distinct) for e in report.epochs.others] == [(1, 20, 4), (0, 30, 6), (1, 30, 18)]


def test_positions_that_are_left_out_without_a_roll_back_in_the_journal_are_wrong() -> None:
    with _written([Stretch(steps=5), Stretch(back=2, steps=4, goes_past=True)]) as done:
        assert verify_data(done.run).left_out == [(12, 16)]
        (done.run / "journal.jsonl").write_text("")
        (wrong,) = verify_data(done.run).wrong
        assert "12 to 15" in wrong.text


def test_first_steps_that_only_the_journal_has_are_wrong() -> None:
    def only_in_journal(run: Path) -> list[str]:
        return [wrong.text for wrong in verify_data(run).wrong if "in the journal" in wrong.text]

    with _written([Stretch(size=2, steps=4, global_batch=6), Stretch(size=2, steps=3, global_batch=6)]) as done:
        _remove(done.run, 0)
        assert not only_in_journal(done.run), "it may be another run's state"
        journal = done.run / "journal.jsonl"
        journal.write_text('{"event":"started","size":2}\n{"step":1,"step_s":1.0}\n{"step":2,"step_s":1.0}\n')
        (wrong,) = only_in_journal(done.run)
        assert wrong.startswith("steps 1 to 4 ")


def test_samples_of_steps_that_changed_nothing_are_counted() -> None:
    with _written(TWO) as done:
        (done.run / "journal.jsonl").write_text(
            '{"step":1,"skipped":true}\n{"step":2,"skipped":true}\n{"step":3,"skipped":false}\n'
            '{"event":"started"}\n{"step":2,"skipped":false}\n{"step":3,"skipped":true}\n'
        )
        (note,) = [note for note in verify_data(done.run).notes if "changed nothing" in note]
        assert note.startswith("2 step(s)") and note.endswith("step 1")


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no ledger"):
        verify_data(tmp_path)
