"""What TensorBoard's files hold: events, the prepared page of charts, and texts."""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.observe.journal import append_whole
from hvdtrain.observe.scalars import MACHINE
from hvdtrain.yaml_file import flatten

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_PREFIX = "events.out.tfevents."


def _stamp(directory: Path) -> int:
    """Return now in seconds, or later: files are read in order of name, and another host's clock may be ahead."""
    found = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in directory.glob(f"{_PREFIX}*")]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in found if stamp.isdecimal())])


class EventFile:
    """Appends summaries by one system call each, so that a killed process loses none.

    torch's `SummaryWriter` does not fit. It writes no session start to the first file, so TensorBoard's Python reader
    ignores the first restart. It names files by the clock alone, so files of a host with a slow clock are read in the
    wrong order. It imports TensorFlow if installed, and has one thread per file.

    `directory` is one run of TensorBoard's. Readers drop points of `first_step` and later steps in its earlier files.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{_PREFIX}{_stamp(directory):010d}.{socket.gethostname()}.{threading.get_native_id()}"
        self._event = Event
        self._file = path.open("xb", buffering=0)
        self._encoded = io.BytesIO()
        self._records = RecordWriter(self._encoded)
        now = time.time()
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        # A START event drops later steps of every tag in this folder, also of tags that do not follow.
        self._write(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, summary: Summary, step: int, time_s: float) -> None:
        """Append a summary of `step`; `time_s` is since 1970. Errors: OSError."""
        self._write(self._event(wall_time=time_s, step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: object) -> None:
        """Append a record whole, because readers stop at an incomplete one."""
        self._encoded.seek(0)
        self._encoded.truncate()
        self._records.write(event.SerializeToString())  # type: ignore[attr-defined]
        append_whole(self._file, self._encoded.getvalue())


STACK_FROM, STACK_TO = "step_stacked_ms/from", "step_stacked_ms/to"
"""Tags of the lower and upper edge of a band."""

STACK_TITLE = "where a step's time goes (ms, stacked)"

STRAGGLER_TITLE = "delay of the slowest rank after the next slowest (ms per step)"

LOSS_BY_STEP, LOSS_BY_SAMPLES, LOSS_BY_SECONDS = "loss_by_step/loss", "loss_by_samples/loss", "loss_by_seconds/loss"
"""Tags of both the training loss and the held-out loss, which is in other runs and so has another colour."""

LOSS_CHARTS = {
    "loss by seconds of training": LOSS_BY_SECONDS,
    "loss by samples": LOSS_BY_SAMPLES,
    "loss: training (run .), held-out (run heldout)": LOSS_BY_STEP,
}
"""Titles and tags of the charts of losses. TensorBoard shows margin charts last first."""


def _categories(unit: str, *, gpu: bool, several: bool, flops: bool, peak: bool) -> dict[str, dict[str, str]]:
    """Return titles and tags of charts by category.

    Each has one tag: a line's colour depends on its run only, so two tags of a run look the same.
    """
    overview = {
        f"{unit} per second": f"speed/{unit}_per_s",
        "wait for the exchange and late ranks, rank 0 (% of a step)": "communication/exposed_percent",
    }
    if several:
        overview[STRAGGLER_TITLE] = "straggler/cost_ms"
        overview["exposed communication, mean over ranks (ms per step)"] = "straggler/exposed_ms"
    training = {"learning rate": "optimizer/learning_rate", "gradient norm": "optimizer/gradient_norm"}
    machine = {"TFLOP/s": "speed/tflops_per_s"} if flops else {}
    machine |= {"FLOPs utilisation (%)": "speed/flops_utilisation_percent"} if peak else {}
    for field, (tag, _, title) in MACHINE.items():
        if title and (gpu or not field.startswith(("gpu_", "cuda_"))):
            machine[title] = tag
    return {"overview": overview, "training": training, "machine": machine}


def layout(unit: str, *, gpu: bool, several: bool, flops: bool, peak: bool) -> Summary:
    """Return the layout of the custom scalars page.

    TensorBoard smooths multiline charts by 0.6, which draws a few points of held-out loss far from their values. Margin
    charts are not smoothed, so losses have margin charts without a margin. In a category of their own: in each category
    TensorBoard shows margin charts after the others.

    TensorBoard has no stacked chart either. A margin chart fills the area between two tags: with one run per band, each
    band between the sum of the parts below it and the sum that includes it, the bands form a stack.

    A `gpu`, `several` ranks, known `flops` per sample and a known `peak` of the devices add charts.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.plugins.custom_scalar import layout_pb2

    def margin(title: str, low: str, high: str) -> Any:
        series = layout_pb2.MarginChartContent.Series(value=high, lower=low, upper=high)
        return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=[series]))

    def line(title: str, tag: str) -> Any:
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{re.escape(tag)}$"]))

    charts = {"loss": [margin(title, tag, tag) for title, tag in LOSS_CHARTS.items()]}
    for category, tags in _categories(unit, gpu=gpu, several=several, flops=flops, peak=peak).items():
        charts[category] = [line(title, tag) for title, tag in tags.items()]
    charts["overview"].append(margin(STACK_TITLE, STACK_FROM, STACK_TO))
    categories = [layout_pb2.Category(title=title, chart=members) for title, members in charts.items()]
    content = layout_pb2.Layout(category=categories).SerializeToString()
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=TensorShapeProto())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="custom_scalars"))
    return Summary(value=[Summary.Value(tag="custom_scalars__config__", tensor=tensor, metadata=metadata)])


def text(tag: str, markdown: str) -> Summary:
    """Return Markdown for the text page."""
    from torch.utils.tensorboard import summary

    return summary.text(tag, markdown)  # type: ignore[no-untyped-call]


def config_table(started: Mapping[str, Any]) -> str:
    """Return a Markdown table of ranks, parameters and all options, from the record of the run's start."""
    rows = [(name, started[name]) for name in ("size", "parameters", "unit") if name in started]
    rows += flatten(started.get("config") or {}).items()
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join(["| option | value |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return "" if value is None else str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def findings(explained: Mapping[str, Any]) -> str:
    """Return Markdown of the report at the run's end: the verdict, and a table of findings."""
    lines = [f"**{_cell('; '.join(explained['verdict']))}.**", ""]
    if explained["findings"]:
        lines += ["| cost, at most (ms per step) | finding | what to try |", "|---|---|---|"]
    for found in explained["findings"]:
        cost = "" if found["cost_ms"] is None else f"{found['cost_ms']:.3g}"
        lines.append(f"| {cost} | {_cell(found['text'])} | {_cell(found['advice'])} |")
    return "\n".join(lines)


def scalars(values: Mapping[str, float]) -> Summary:
    """Return all numbers of a point as one summary."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
