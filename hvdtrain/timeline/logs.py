"""Messages of Horovod's stall inspector and of NCCL in a job's output, each once with its count and source."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hvdtrain.errors import TraceError
from hvdtrain.files import open_regular
from hvdtrain.timeline.log_facts import Nccl, Stalls

_TAG = re.compile(r"\[\d+(?:,\d+)?\](?:\[\S+\])?<(?:stdout|stderr|stddiag)>:? ?")
"""Prefix of mpirun --tag-output and horovodrun. Open MPI also inserts it within a line."""

_LONGEST = 1 << 14
_LOGS = ("*.log", "*.out", "*.err", "output/**/*")


def collect_lines(paths: Sequence[Path]) -> list[str]:
    """Summarise a job's output.

    Args:
        paths: output files, of one rank or of all; also those of NCCL_DEBUG_FILE.

    Returns:
        Lines about stalled ranks, NCCL's warnings, its network and links.

    Errors:
        TraceError: a file cannot be read.
    """
    stalls, nccl = Stalls(), Nccl()
    for path in paths:
        for line in _lines(path):
            if not nccl.add_line(line):
                stalls.add_line(line)
        stalls.end()
    return [*stalls.lines(), *nccl.lines()]


def find_logs(run: Path, nccl_debug_file: str | None = None) -> list[Path]:
    """Find the output files of a run.

    Args:
        run: its folder: ``*.log, *.out, *.err`` there, and the files in ``output/``.
        nccl_debug_file: NCCL_DEBUG_FILE as an absolute path, in which %h is the host and %p the process.
    """
    found = {path for pattern in _LOGS for path in run.glob(pattern) if path.is_file()}
    if nccl_debug_file:
        pattern = re.sub("%[hp]", "*", glob.escape(nccl_debug_file))
        found |= {path for path in Path("/").glob(pattern.lstrip("/")) if path.is_file()}
    return sorted(found)


def _lines(path: Path) -> Iterator[str]:
    """Yield lines without the prefixes of launchers.

    Errors:
        TraceError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            for raw in iter(lambda: file.readline(_LONGEST), b""):
                yield from _plain(raw.decode("utf-8", "replace"))
    except OSError as error:
        raise TraceError(
            f"the output {path} cannot be read",
            found=error.strerror or str(error),
            next_step="check the path and its permissions",
        ) from None


def _plain(line: str) -> Iterable[str]:
    return [part for part in _TAG.sub("", line).splitlines() if part.strip()]
