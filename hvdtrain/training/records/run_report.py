"""The analysis at the end of a run: where the time went, as a page and as data next to its traces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hvdtrain.files import write_text
from hvdtrain.errors import HvdtrainError
from hvdtrain.run_layout import RunLayout
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.training.records.remote_spans import collect_spans
from hvdtrain.training.round import Round

MOST_BYTES = 1 << 25
"""Limits of the spans, Timelines and output that are read at the end of a run, so that this takes less than a second.
`hvdtrain timeline report` reads everything."""


def explain_run(current: Round) -> Analysis | None:
    """Close the watchers, analyse their files, and write page and data next to them. Collective: yes.

    Does nothing if the options record no traces. A failure here is a warning: the run has succeeded.

    Returns:
        The analysis, on rank 0; None elsewhere, and if it failed.
    """
    if current.run.config.observe.timeline == "off":
        return None
    recorder, comm, layout = current.recorder, current.comm, current.layout
    try:
        recorder.close_watchers()
    except Exception as error:  # such as a full disk; the other ranks wait in the next collective
        recorder.warn(f"a trace of rank {comm.rank} is incomplete: {type(error).__name__}: {error}")
    collect_spans(comm, layout.timeline.folder, recorder.warn)  # waits for all ranks: their files are closed then
    if comm.rank != 0:
        return None
    try:
        analysis = _analyse(layout)
        facts = _facts(analysis)
    except Exception as error:
        recorder.warn(f"the analysis of the run failed: {type(error).__name__}: {error}")
        return None
    try:
        recorder.event({"event": "explained", "at_step": current.worker.state.progress.step, **facts})
    except HvdtrainError as error:  # the disk is full
        recorder.warn(error.what)
    return analysis


def _analyse(layout: RunLayout) -> Analysis:
    from hvdtrain.timeline.analysis.analyse import analyse
    from hvdtrain.timeline.report.form import to_bytes
    from hvdtrain.timeline.report.page import to_html
    from hvdtrain.timeline.run import load

    analysis = analyse(load(layout.folder, most_bytes=MOST_BYTES))
    timeline = layout.timeline
    timeline.folder.mkdir(parents=True, exist_ok=True)
    write_text(timeline.report_page, to_html(analysis))
    write_text(timeline.report_data, to_bytes(analysis).decode())
    return analysis


def _facts(analysis: Analysis) -> dict[str, Any]:
    """Return the facts for journal and sinks."""
    from hvdtrain.timeline.report.page import headline

    findings = [asdict(finding) for finding in analysis.findings]
    return {"verdict": headline(analysis), "figures": figures(analysis), "findings": findings}
