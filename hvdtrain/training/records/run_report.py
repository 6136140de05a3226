"""What a run says of itself at its end: where the time went, as a page and as data beside its traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.durable import write_text
from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.training.records.remote_spans import bring_spans

MOST_BYTES = 1 << 25
"""Of spans, of Timelines and of output, that is read at the end of a run, where all of its steps may have been traced:
what takes less than a second. `hvdtrain timeline report` reads everything."""


def report(observe: ObserveConfig, directory: Path, recorder: Recorder, comm: Comm, step: int) -> Analysis | None:
    """End the watchers, and explain the run from what they wrote. Collective: yes; where no rank has failed.

    What goes wrong is a warning: the run has ended well.

    Args:
        observe: nothing is done where no traces are recorded.
        directory: of the run; page and data go into its ``timeline/``.
        recorder: of this rank; told of an event "explained".
        comm: the ranks.
        step: the last one.

    Returns:
        What was found, on rank 0; None elsewhere, and where nothing was.
    """
    if observe.timeline == "off":
        return None
    try:
        recorder.close_watchers()
    except Exception as error:  # as of a disk that is full when a file is closed; the other ranks go on to what follows
        recorder.warn(f"a trace of rank {comm.rank} is not whole: {type(error).__name__}: {error}")
    bring_spans(
        comm, RunLayout(directory).timeline.folder, recorder.warn
    )  # waits for all ranks: their files are closed then
    if comm.rank != 0:
        return None
    try:
        analysis = _explain(directory)
        told = _told(analysis)
    except Exception as error:
        recorder.warn(f"where the time went is not told: {type(error).__name__}: {error}")
        return None
    try:
        recorder.event({"event": "explained", "at_step": step, **told})
    except HvdtrainError as error:  # the disk is full
        recorder.warn(error.what)
    return analysis


def _explain(directory: Path) -> Analysis:
    from hvdtrain.timeline.analysis.analyse import analyse
    from hvdtrain.timeline.report.form import to_bytes
    from hvdtrain.timeline.report.page import to_html
    from hvdtrain.timeline.run import load

    analysis = analyse(load(directory, most_bytes=MOST_BYTES))
    timeline = RunLayout(directory).timeline
    timeline.folder.mkdir(parents=True, exist_ok=True)
    write_text(timeline.report_page, to_html(analysis))
    write_text(timeline.report_data, to_bytes(analysis).decode())
    return analysis


def _told(analysis: Analysis) -> dict[str, Any]:
    """What journal and sinks get of it."""
    from hvdtrain.timeline.report.page import headline

    findings = [asdict(finding) for finding in analysis.findings]
    return {"verdict": headline(analysis), "figures": figures(analysis), "findings": findings}
