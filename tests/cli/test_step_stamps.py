"""Stamps of real jobs: every step of every rank, each start, and Horovod's times compared with ours."""

from __future__ import annotations

import numpy as np

from hvdtrain.observe.past_journal import read_steps as read_journal_steps
from hvdtrain.timeline.read import read_horovod
from hvdtrain.timeline.steps import read_span_files, read_starts, wall_clock_us
from tests.support.gallery import STEPS, Gallery
from tests.support.step_tables import read_spans


def test_every_step_of_every_rank_is_there_start_after_start(gallery: Gallery) -> None:
    run, size = gallery["resumed"].run, 2
    first, second = read_starts(run / "timeline")
    assert first.steps.step.tolist() == list(range(1, 26))
    assert second.steps.step.tolist() == list(range(26, STEPS + 1))
    assert (first.number, second.number, second.at_step) == (0, 1, 25)
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
        assert start.link and all(nbytes for nbytes, _ in start.link)
        assert all(len(facts["cpu_wait_us"]) == size for facts in table.facts)
        inside = sum(table.parts_us[name] for name in table.parts_us if name not in ("aside", "gc"))
        assert (inside <= table.end_us - table.start_us + 1).all()
    aside = dict(zip(second.steps.step.tolist(), second.steps.parts_us["aside"][0].tolist(), strict=True))
    assert aside[41] > 0 and aside[42] == 0
    assert [spans.rank for spans in read_spans(run / "timeline")] == list(range(size))


APART_US = 50_000.0
"""Between Horovod's clock and ours: of the pair of looks that joins them a busy machine may delay the second."""


def test_horovods_own_times_lie_inside_of_ours(gallery: Gallery) -> None:
    """On rank 0's clock, put there by the pair of times in its span file."""
    run = gallery["two"].run
    (file,) = (run / "timeline").glob("horovod-*")
    horovod, wall_us = read_horovod(file), wall_clock_us(read_span_files(run / "timeline"))
    assert horovod.epoch_us is not None and wall_us is not None
    spans = read_spans(run / "timeline")[0]
    assert len(spans.buckets) == 2
    for track, bucket in spans.buckets.items():
        mine = (spans.track == track) & (spans.step >= 10) & (spans.step <= 30)
        tensor, phase = list(horovod.tensors).index(f"allreduce.{bucket.name}"), list(horovod.phases).index("ALLREDUCE")
        theirs = (horovod.tensor == tensor) & (horovod.phase == phase)
        start_us = horovod.start_us[theirs] + (horovod.epoch_us - wall_us)
        assert len(start_us) == mine.sum() == 21
        assert (spans.start_us[mine] - APART_US <= start_us).all()
        assert (start_us + horovod.duration_us[theirs] <= spans.end_us[mine] + APART_US).all()
