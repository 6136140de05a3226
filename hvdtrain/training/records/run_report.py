"""The analysis of a run for its user at its end: where the time went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_json, broadcast_json
from hvdtrain.errors import HvdtrainError, listed
from hvdtrain.files import write_text
from hvdtrain.run_layout import RunLayout, TimelineLayout
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.training.round import Round

MOST_BYTES = 1 << 25
"""Limits of the spans, Timelines and output that are read at the end of a run, so that this takes less than a second.
`hvdtrain timeline report` reads everything."""


def explain_run(current: Round) -> Analysis | None:
    """Close the watchers, analyse their files, and write page and data next to them. Collective: yes.

    Does nothing if the options record no traces. A failure here is a warning: the run has succeeded.

    Returns the analysis, on rank 0; None elsewhere, and if it failed.
    """
    if current.run.config.observe.timeline == "off":
        return None
    recorder, comm, layout = current.recorder, current.comm, current.layout
    try:
        recorder.close_watchers()
    except Exception as error:  # such as a full disk; the other ranks wait in the next collective
        recorder.warn(f"a trace of rank {comm.rank} is incomplete: {type(error).__name__}: {error}")
    wait_for_spans(comm, layout.timeline, recorder.warn)
    if comm.rank != 0:
        return None
    try:
        from hvdtrain.timeline.report.page import headline

        analysis = _analyse(layout)
        findings = [asdict(finding) for finding in analysis.findings]
        facts = {"verdict": headline(analysis), "figures": figures(analysis), "findings": findings}
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


def wait_for_spans(comm: Comm, layout: TimelineLayout, warn: Callable[[str], None]) -> None:
    """Wait until all ranks have closed their files; rank 0 warns of those it does not see. Collective: yes."""
    # Other ranks may reach this first collective while rank 0 still closes Horovod's Timeline (see `HorovodTimeline`).
    broadcast_json(comm, None, name="timeline/closed")
    written = allgather_json(comm, layout.spans(comm.rank).exists(), name="timeline/files")
    far = [rank for rank, is_there in enumerate(written) if is_there and not layout.spans(rank).exists()]
    if far and comm.rank == 0:
        warn(
            f"the spans of rank(s) {listed(far, 8)} are on other hosts, in {layout.folder}: copy them to rank 0's, "
            "then run hvdtrain timeline report"
        )
