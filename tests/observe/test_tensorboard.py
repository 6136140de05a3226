"""What TensorBoard's own reader finds: the journal's values, each step once, whatever was killed and resumed."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tensorboard", reason="tensorboard is not installed: make setup")
from tensorboard.plugins.custom_scalar import layout_pb2

from hvdtrain.observe import tensorboard_page as page
from hvdtrain.observe.past_journal import read_steps
from hvdtrain.observe.scalars import BANDS, MACHINE
from hvdtrain.observe.tensorboard import EVERY_S, TensorBoard
from hvdtrain.observe.tensorboard_page import EventFile
from tests.support.full_disk import room_for
from tests.support.tensorboard_run import BATCH, STARTED, Run, read, series, single, step_record


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_every_slow_step_has_the_journals_values(run: Run) -> None:
    run.stretch(None, [0.5] * 7)
    steps = read_steps(run.journal)
    fields = {"loss/train": "loss", "optimizer/learning_rate": "lr", "optimizer/gradient_norm": "grad_norm"}
    for tag, field in fields.items():
        assert series(run.folder, tag) == {n: single(line[field]) for n, line in steps.items()}
    speed = {n: single(line["tokens"] / line["step_s"]) for n, line in steps.items()}
    assert series(run.folder, "speed/words_per_s") == pytest.approx(speed)
    assert series(run.folder, "communication/exposed_percent") == pytest.approx(dict.fromkeys(steps, 15.0))
    assert series(run.folder, "communication/exposed_ms") == pytest.approx(dict.fromkeys(steps, 75.0))
    by_samples = series(run.folder / "by_samples", page.LOSS_BY_SAMPLES)
    assert by_samples == {line["position"]: single(line["loss"]) for line in steps.values()}
    by_seconds = series(run.folder / "by_seconds", page.LOSS_BY_SECONDS)
    assert by_seconds == {n // 2: single(steps[n]["loss"]) for n in (1, 2, 4, 6)}
    # The bands lie on each other and fill the step.
    floor = dict.fromkeys(steps, 0.0)
    for band in BANDS:
        low, high = (series(run.folder / "step" / band, tag) for tag in (page.STACK_FROM, page.STACK_TO))
        assert low == floor
        assert all(low[step] <= high[step] for step in low)
        floor = high
    assert floor == pytest.approx(dict.fromkeys(steps, 500.0)) and series(run.folder, "step_ms/step") == floor


def test_fast_steps_are_thinned_to_means_and_the_last_is_kept(run: Run) -> None:
    durations = [0.001 * (1 + step % 3) for step in range(1000)]
    run.stretch(None, durations)
    steps, shown = read_steps(run.journal), series(run.folder, "step_ms/step")
    assert {1, 1000} <= shown.keys()
    assert len(shown) <= sum(durations) / EVERY_S + 2
    before = 0
    for step, mean_ms in shown.items():
        part = [steps[n] for n in range(before + 1, step + 1)]
        assert mean_ms == pytest.approx(1e3 * sum(line["step_s"] for line in part) / len(part), rel=1e-5)
        assert series(run.folder, "loss/train")[step] == single(steps[step]["loss"])
        before = step
    speed = series(run.folder, "speed/words_per_s")[1000]
    last = [steps[n] for n in range(sorted(shown)[-2] + 1, 1001)]
    assert speed == pytest.approx(sum(line["tokens"] for line in last) / sum(line["step_s"] for line in last), rel=1e-5)


DURATIONS = st.sampled_from([0.001, 0.1, 0.3, 1.7])


@settings(max_examples=15)
@given(
    stretches=st.lists(st.tuples(st.lists(DURATIONS, min_size=1, max_size=30), st.booleans()), min_size=1, max_size=4),
    every=st.integers(2, 9),
)
def test_no_point_twice_and_none_lost(
    tmp_path_factory: pytest.TempPathFactory, stretches: list[tuple[list[float], bool]], every: int
) -> None:
    run, saved = Run(tmp_path_factory.mktemp("run")), None
    for durations, end in stretches:
        run.stretch(saved, durations, save_every=every, end=end)
        done = (saved or 0) + len(durations)
        saved = done // every * every or None
    steps = read_steps(run.journal)
    shown = series(run.folder, "loss/train")
    assert shown == {n: single(steps[n]["loss"]) for n in shown}
    assert set(range(every, done + 1, every)) <= shown.keys(), "each step that was saved"
    # Within a stretch neighbouring points are no further apart than the thinning and a step.
    ordered = sorted(shown)
    for before, after in pairwise(ordered):
        between = sum(steps[n]["step_s"] for n in range(before + 1, after))
        assert between <= EVERY_S + 1e-6, (before, after)
    samples = series(run.folder / "by_samples", page.LOSS_BY_SAMPLES)
    assert samples == {BATCH * n: value for n, value in shown.items()}
    total, second = 0.0, {}
    for n in sorted(steps):
        total += steps[n]["step_s"] if n <= done else 0.0
        second[n] = int(total)
    seconds = series(run.folder / "by_seconds", page.LOSS_BY_SECONDS)
    for x, loss in seconds.items():
        assert loss in {single(steps[n]["loss"]) for n in second if second[n] == x}
    for band in BANDS:
        assert series(run.folder / "step" / band, page.STACK_TO).keys() == shown.keys()


def test_a_host_with_a_late_clock_continues_correctly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 2e9)
    run.stretch(None, [0.5] * 9, save_every=2, end=False)
    monkeypatch.setattr("time.time", lambda: 1e9)
    run.stretch(4, [0.5] * 3)
    assert series(run.folder, "loss/train").keys() == set(range(1, 8))
    assert all(len(list(folder.glob("events*"))) == 2 for folder in (run.folder, run.folder / "by_samples"))
    run.stretch(None, [0.5] * 3)
    assert series(run.folder, "loss/train").keys() == {1, 2, 3}, "a restart in the same folder replaces all"
    assert "loss/heldout" not in read(run.folder).Tags()["scalars"] or not series(run.folder, "loss/heldout")


def test_of_a_long_run_the_older_points_stay(run: Run) -> None:
    run.stretch(None, [1.0] * 99, save_every=10, end=False)
    before = read(run.folder).Scalars("loss/train")[:40]
    run.stretch(90, [1.0] * 6, save_every=10)
    assert list(series(run.folder, "loss/train")) == list(range(1, 97))
    assert list(series(run.folder / "by_samples", page.LOSS_BY_SAMPLES)) == [BATCH * n for n in range(1, 97)]
    assert list(series(run.folder / "by_seconds", page.LOSS_BY_SECONDS)) == list(range(1, 97))
    assert list(series(run.folder, "loss/heldout")) == list(range(10, 91, 10))
    assert read(run.folder).Scalars("loss/train")[:40] == before
    newest = max(run.folder.glob("events*"))
    assert read(newest).Scalars("loss/train")[0].step > 50, "not all of it is written again"


def test_what_a_killed_process_had_not_written_is_taken_from_the_journal(run: Run) -> None:
    run.stretch(None, [0.5] * 9, save_every=4)
    whole = {folder: run.everything(folder) for folder in run.folders()}
    shutil.rmtree(run.folder)
    run.now -= 0.5
    run.stretch(8, [0.5])
    assert {folder: run.everything(folder) for folder in run.folders()} == whole


def _write(folder: Path, *records: dict[str, Any], gpu: bool = False) -> Any:
    sink = TensorBoard(folder, folder / "missing", gpu=gpu)
    for record in records:
        sink.write(record)
    sink.close()
    return read(folder)


LATE = {"late_ms": [1.0, 9.5, 2.5], "exposed_ms": [10.0, 2.0, 9.0], "step_ms": [50.0, 50.0, 50.0]}
RANKS = {"event": "ranks", "at_step": 1, **LATE}
FIRST, SECOND, THIRD = (step_record(n, 1e9 + n - 1) for n in (1, 2, 3))
EVALUATED = {"event": "evaluation", "loss": 0.5, "metrics": {"accuracy": 0.75}}
FLOPS = {"event": "flops", "per_sample": 1.25e10, "peak_per_s": 1e12}  # 16 samples in half a second


def test_what_is_recorded_is_a_series(tmp_path: Path) -> None:
    before, now = {**EVALUATED, "at_step": 0}, {**EVALUATED, "at_step": 1, "metrics": {}, "loss": 0.25}
    machine = {"event": "machine", "process_rss_bytes": 3 << 30, "gpu_throttle": ["power cap"]}
    held = {"event": "memory", "at_step": 1, "mib": {"parameters": 2.0, "activations and rest": 7.5}}
    outer = {"event": "outer_step", "at_step": 1, "wait_s": 0.25, "drift": 0.5, "cosines": [0.9, 0.75]}
    later = {**RANKS, "at_step": 2, "late_ms": [None, 1.0, 3.0], "exposed_ms": [None, 4.0, 2.0]}
    nothing = {**RANKS, "at_step": 3, "late_ms": [], "exposed_ms": []}
    first = [FLOPS, before, {**machine, "host_cpu_percent": 50.0}, FIRST, now, held, outer, RANKS]
    _write(tmp_path, STARTED, *first, {**machine, "host_cpu_percent": 60.0}, SECOND, later, THIRD, nothing)
    expected = {
        "loss/heldout": {0: 0.5, 1: 0.25},
        "heldout/accuracy": {0: 0.75},
        f"heldout:{page.LOSS_BY_STEP}": {0: 0.5, 1: 0.25},
        f"heldout/by_samples:{page.LOSS_BY_SAMPLES}": {0: 0.5, BATCH: 0.25},
        f"heldout/by_seconds:{page.LOSS_BY_SECONDS}": {0: 0.5},
        "speed/tflops_per_s": dict.fromkeys((1, 2, 3), 0.4),
        "speed/flops_utilisation_percent": dict.fromkeys((1, 2, 3), 40.0),
        "machine/host_cpu_percent": {1: 50.0, 2: 60.0},  # a sample belongs to the next step
        "memory/process_gib": {1: 3.0, 2: 3.0},
        "machine/gpu_throttled": {1: 1.0, 2: 1.0},
        "outer/drift": {1: 0.5},
        "outer/cosine": {1: 0.75},
        "outer/wait_ms": {1: 250.0},
        "memory_mib/parameters": {1: 2.0},
        "memory_mib/activations_and_rest": {1: 7.5},
        "straggler/cost_ms": {1: 7.75, 2: 2.0},
        "straggler/rank": {1: 1.0, 2: 2.0},
        "straggler/exposed_ms": {1: 7.0, 2: 3.0},
        page.LOSS_BY_STEP: series(tmp_path, "loss/train"),  # the held-out loss is in another run
    }
    for name, values in expected.items():
        folder, _, tag = name.rpartition(":")
        assert series(tmp_path / folder, tag) == pytest.approx(values), name


def test_what_is_not_a_number_or_not_known_is_no_point(tmp_path: Path) -> None:
    _write(tmp_path, STARTED, {**FLOPS, "peak_per_s": None}, FIRST, {**EVALUATED, "at_step": 1, "loss": float("nan")})
    tags = read(tmp_path).Tags()["scalars"]
    assert "speed/flops_utilisation_percent" not in tags and list(series(tmp_path, "loss/heldout")) == [1]


def _text(found: Any, tag: str) -> str:
    (event,) = found.Tensors(tag)
    text: str = event.tensor_proto.string_val[0].decode()
    return text


def test_the_config_and_what_happened_are_text(tmp_path: Path) -> None:
    found = _write(tmp_path, STARTED, FIRST, {"event": "warning", "text": "mind the gap", "time": 1e9})
    lines = _text(found, "config/text_summary").splitlines()
    assert {"| train.global_batch | 16 |", "| data.text | a\\|b*.md |", "| parameters | 5 |"} <= set(lines)
    assert "mind the gap" in _text(found, "events/warning/text_summary")


def test_figures_of_the_end_are_at_the_last_step(tmp_path: Path) -> None:
    late = {"kind": "straggler", "text": "Rank 1 | is late.", "cost_ms": 7.5, "advice": "try --loader.workers 4"}
    explained = {
        **{"event": "explained", "at_step": 2, "verdict": ["A step takes 50 ms", "rank 1 on a|b is late"]},
        "figures": {"step_ms": 50.0, "straggler_ms": 7.5, "hidden_share": None},
        "findings": [late, {"kind": "note", "text": "x", "cost_ms": None, "advice": ""}],
    }
    found = _write(tmp_path, STARTED, FIRST, step_record(2, 1e9 + 0.01), {"event": "finished"}, explained)
    assert series(tmp_path, "report/step_ms") == {2: 50.0}
    assert series(tmp_path, "report/straggler_ms") == {2: 7.5}
    assert "report/hidden_share" not in found.Tags()["scalars"]
    assert list(series(tmp_path, "loss/train")) == [1, 2]
    lines = _text(found, "report/findings/text_summary").splitlines()
    assert lines[0] == "**A step takes 50 ms; rank 1 on a\\|b is late.**"
    assert "| 7.5 | Rank 1 \\| is late. | try --loader.workers 4 |" in lines


GPU_FIELDS = [field for field in MACHINE if field.startswith(("gpu_", "cuda_"))]


@pytest.mark.parametrize("gpu", [False, True])
def test_the_page_of_charts_names_tags_that_are_written(tmp_path: Path, gpu: bool) -> None:
    machine = {"event": "machine", **dict.fromkeys(GPU_FIELDS if gpu else [], 1)}
    machine |= dict.fromkeys(("host_cpu_percent", "host_memory_used_bytes", "process_rss_bytes"), 1)
    events = [FLOPS, machine, FIRST, {**EVALUATED, "at_step": 1}, RANKS]
    found = _write(tmp_path, STARTED, *events, gpu=gpu)
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir() and path.name != "step")]
    written = {tag for folder in folders for tag in read(folder).Tags()["scalars"]}
    (event,) = found.Tensors("custom_scalars__config__")
    loss, rest, *others = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
    charts = [chart for category in (loss, rest, *others) for chart in category.chart]
    for chart in charts:
        for pattern in chart.multiline.tag:
            assert any(re.match(pattern, tag) for tag in written), pattern
        for band in chart.margin.series:
            assert {band.value, band.lower, band.upper} <= written
    assert [chart.title for chart in loss.chart] == [*page.LOSS_CHARTS]
    assert {chart.title for chart in rest.chart} >= {"words per second", page.STACK_TITLE, page.STRAGGLER_TITLE}
    assert all(len(chart.multiline.tag) + len(chart.margin.series) == 1 for chart in charts), "one colour, one line"
    assert ("GPU (%)" in {chart.title for chart in charts}) == gpu
    (alone,) = _write(tmp_path / "alone", {**STARTED, "size": 1}, FIRST).Tensors("custom_scalars__config__")
    assert page.STRAGGLER_TITLE.encode() not in alone.tensor_proto.string_val[0], "one rank has no chart of ranks"


def test_a_record_that_finds_no_room_spoils_no_other(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 0)
    (path,) = tmp_path.iterdir()
    file.add(page.scalars({"loss": 1.0}), 1, 1e9)
    for more_bytes in (0, 1, 11, 12, 20):
        with room_for(path, more_bytes), pytest.raises(OSError, match=r"No space left|too large"):
            file.add(page.scalars({"loss": 2.0}), 2, 1e9)
    file.add(page.scalars({"loss": 3.0}), 3, 1e9)
    file.close()
    assert series(tmp_path, "loss") == {1: 1.0, 3: 3.0}
