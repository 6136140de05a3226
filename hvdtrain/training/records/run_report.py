"""The analysis at the end of a run: where the time went, as a page and as data next to its traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Comm
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.errors import HvdtrainError
from hvdtrain.files import write_text
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.training.records.remote_spans import collect_spans

MOST_BYTES = 1 << 25
"""Limits of the spans, Timelines and output that are read at the end of a run, so that this takes less than a second.
`hvdtrain timeline report` reads everything."""


def explain_run(observe: ObserveConfig, directory: Path, recorder: Recorder, comm: Comm, step: int) -> Analysis | None:
    """Close the watchers, and analyse their files, if no rank has failed. Collective: yes.

    A failure here is a warning: the run has succeeded.

    Args:
        observe: does nothing if these options record no traces.
        directory: of the run; page and data are written to its ``timeline/``.
        recorder: of this rank; records an event "explained".
        comm: the ranks.
        step: the last step.

    Returns:
        The analysis, on rank 0; None elsewhere, and if it failed.
    """
    if observe.timeline == "off":
        return None
    try:
        recorder.close_watchers()
    except Exception as error:  # such as a full disk; the other ranks wait in the next collective
        recorder.warn(f"a trace of rank {comm.rank} is incomplete: {type(error).__name__}: {error}")
    collect_spans(
        comm, RunLayout(directory).timeline.folder, recorder.warn
    )  # waits for all ranks: their files are closed then
    if comm.rank != 0:
        return None
    try:
        analysis = _analyse(directory)
        facts = _facts(analysis)
    except Exception as error:
        recorder.warn(f"the analysis of the run failed: {type(error).__name__}: {error}")
        return None
    try:
        recorder.event({"event": "explained", "at_step": step, **facts})
    except HvdtrainError as error:  # the disk is full
        recorder.warn(error.what)
    return analysis


def _analyse(directory: Path) -> Analysis:
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


def _facts(analysis: Analysis) -> dict[str, Any]:
    """Return the facts for journal and sinks."""
    from hvdtrain.timeline.report.page import headline

    findings = [asdict(finding) for finding in analysis.findings]
    return {"verdict": headline(analysis), "figures": figures(analysis), "findings": findings}
