"""Stamps of real jobs: every step of every rank, each start, and Horovod's times compared with ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdtrain.observe.past_journal import read_steps as read_journal_steps
from hvdtrain.timeline.read import read_horovod
from hvdtrain.timeline.span_files import read_span_files, wall_clock_us
from hvdtrain.timeline.steps import read_starts
from tests.support.gallery import STEPS, TOY, Gallery
from tests.support.step_tables import read_spans
from tests.support.thread_job import train_on_threads


def _check_starts(run: Path, size: int, stops: tuple[int, int], first_step_aside: int) -> None:
    first, second = read_starts(run)
    assert first.steps.step.tolist() == list(range(1, stops[0] + 1))
    assert second.steps.step.tolist() == list(range(stops[0] + 1, stops[1] + 1))
    assert (first.number, second.number, second.at_step) == (0, 1, stops[0])
    assert first.dropped == second.dropped == []
    journal = read_journal_steps(run / "journal.jsonl")
    for start in (first, second):
        table = start.steps
        assert table.start_us.shape == (size, len(table.step))
        assert (table.start_us < table.ready_us).all() and (table.ready_us <= table.released_us).all()
        assert (table.released_us < table.end_us).all()
        assert (table.start_us[:, 1:] >= table.end_us[:, :-1]).all()
        # Nobody has the sums of a step before everybody has begun it, by one clock.
        assert (table.released_us >= table.start_us.max(axis=0)).all()
        step_s = [journal[step]["step_s"] for step in table.step.tolist()]
        # Of the two pairs of looks at the clock, a rank may be put aside between one and the other: most agree.
        apart_s = np.abs((table.end_us - table.start_us)[0] / 1e6 - step_s)
        assert np.median(apart_s) < 0.2 * np.median(step_s)
        assert table.clock_error_us.tolist() == [0] * size
        assert [bool(nbytes) for nbytes, _ in start.link] == [True] * len(start.link) and bool(start.link) == (size > 1)
        assert all(len(facts["cpu_wait_us"]) == size for facts in table.facts)
        inside = sum(table.parts_us[name] for name in table.parts_us if name not in ("aside", "gc"))
        assert (inside <= table.end_us - table.start_us + 1).all()
    aside = dict(zip(second.steps.step.tolist(), second.steps.parts_us["aside"][0].tolist(), strict=True))
    assert aside[first_step_aside] > 0 and aside[first_step_aside + 1] == 0
    assert [spans.rank for spans in read_spans(run)] == list(range(size))


def test_every_step_of_every_rank_is_there_start_after_start(gallery: Gallery) -> None:
    _check_starts(gallery["resumed"].run, 2, (25, STEPS), 41)


@pytest.mark.parametrize("size", [1, 3])
def test_so_it_is_at_other_sizes(size: int, tmp_path: Path) -> None:
    for stop in (5, 12):
        options = ("--train.steps=12", f"--train.stop_at={stop}", "--checkpoint.every=8", f"--run_dir={tmp_path}")
        train_on_threads(*TOY, *options, size=size)
    _check_starts(tmp_path, size, (5, 12), 9)


APART_US = 50_000.0
"""Between Horovod's clock and ours: of the pair of looks that joins them a busy machine may delay the second."""


def test_horovods_own_times_lie_inside_of_ours(gallery: Gallery) -> None:
    """On rank 0's clock, put there by the pair of times in its span file."""
    run = gallery["two"].run
    (file,) = (run / "timeline").glob("horovod-*")
    horovod, wall_us = read_horovod(file), wall_clock_us(read_span_files(run))
    assert horovod.epoch_us is not None and wall_us is not None
    spans = read_spans(run)[0]
    assert len(spans.buckets) == 2
    for track, bucket in spans.buckets.items():
        mine = (spans.track == track) & (spans.step >= 10) & (spans.step <= 30)
        tensor, phase = list(horovod.tensors).index(f"allreduce.{bucket.name}"), list(horovod.phases).index("ALLREDUCE")
        theirs = (horovod.tensor == tensor) & (horovod.phase == phase)
        start_us = horovod.start_us[theirs] + (horovod.epoch_us - wall_us)
        assert len(start_us) == mine.sum() == 21
        assert (spans.start_us[mine] - APART_US <= start_us).all()
        assert (start_us + horovod.duration_us[theirs] <= spans.end_us[mine] + APART_US).all()
