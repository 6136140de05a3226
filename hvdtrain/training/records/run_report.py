"""The analysis of a run for its user at its end: where the time went.

A page and data are written next to the traces. Span files of hosts that do not share the run folder are copied to
rank 0 first.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import torch

from hvdtrain.comm.base import Comm
from hvdtrain.comm.objects import allgather_bytes, allgather_json, broadcast_json
from hvdtrain.errors import HvdtrainError
from hvdtrain.files import write_text
from hvdtrain.observe.span_trace import free_path
from hvdtrain.run_layout import TimelineLayout
from hvdtrain.timeline.analysis.analysis import Analysis, figures
from hvdtrain.training.round import Round

_SPANS_BYTES = 8 << 20  # size limit of one rank's spans that are copied to rank 0; later spans are left out

_SPANS_TOGETHER_BYTES = 256 << 20
"""Size limit of all of them together; every rank receives them, compressed to about a tenth."""

_HEAD_BYTES = 1024  # first bytes of a file of spans, which identify it: they contain the rank and the time of its start

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
    collect_spans(comm, layout.timeline.folder, recorder.warn)  # waits for all ranks: their files are closed then
    if comm.rank != 0:
        return None
    try:
        from hvdtrain.timeline.analysis.analyse import analyse
        from hvdtrain.timeline.report.form import to_bytes
        from hvdtrain.timeline.report.page import headline, to_html
        from hvdtrain.timeline.run import load

        analysis = analyse(load(layout.folder, most_bytes=MOST_BYTES))
        layout.timeline.folder.mkdir(parents=True, exist_ok=True)
        write_text(layout.timeline.report_page, to_html(analysis))
        write_text(layout.timeline.report_data, to_bytes(analysis).decode())
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


def collect_spans(comm: Comm, folder: Path, warn: Callable[[str], None]) -> None:
    """Copy the newest span file of each rank to rank 0's `folder`, after they are closed. Collective: yes.

    Files that rank 0 can already see are not copied. If a file cannot be read or written, rank 0 warns.
    """
    if comm.size == 1:
        return
    # Other ranks may reach this first collective while rank 0 still closes Horovod's Timeline (see `HorovodTimeline`).
    broadcast_json(comm, None, name="timeline/closed")
    own = _newest(folder, comm.rank)
    everyone = allgather_json(comm, [own.name, _fingerprint(own)] if own else None, name="timeline/files")
    missing = []
    if comm.rank == 0:
        missing = [rank for rank, file in enumerate(everyone) if file and _fingerprint(folder / file[0]) != file[1]]
    far = broadcast_json(comm, missing, name="timeline/far")
    if not far:
        return
    most = min(_SPANS_BYTES, _SPANS_TOGETHER_BYTES // len(far))
    content = _packed(own, most) if comm.rank in far and own else b""
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    contents = allgather_bytes(comm, data, name="timeline/contents")
    if comm.rank != 0:
        return
    for rank in far:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = zlib.decompress(contents[rank].numpy().tobytes()).decode()
            write_text(free_path(TimelineLayout(folder).spans(rank)), text)
        except (OSError, zlib.error) as error:
            warn(f"the trace of rank {rank} stays on its host, in {folder}: {error}")


def whole_lines(content: bytes, most: int) -> bytes:
    """Shorten a trace to about `most` bytes; it stays valid, because each line is an event."""
    if len(content) <= most:
        return content
    return content[: content.rindex(b",\n", 0, most)] + b"\n]\n"


def _newest(folder: Path, rank: int) -> Path | None:
    try:
        first = TimelineLayout(folder).spans(rank)
        files = [first, *folder.glob(f"{first.stem}-*.json")]
        return max((path for path in files if path.exists()), key=lambda path: path.stat().st_mtime_ns, default=None)
    except OSError:
        return None


def _fingerprint(path: Path) -> str:
    """Return what identifies a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return sha256(file.read(_HEAD_BYTES)).hexdigest()
    except OSError:
        return ""


def _packed(path: Path, most: int) -> bytes:
    """Compress a file; empty if it cannot be read, which fails to decompress."""
    try:
        return zlib.compress(whole_lines(path.read_bytes(), most), 1)
    except (OSError, ValueError):
        return b""
