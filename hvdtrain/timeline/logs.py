"""What Horovod's stall inspector and NCCL said in a job's output, once each, with how often and by whom."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hvdtrain.errors import TraceError
from hvdtrain.regular import open_regular
from hvdtrain.timeline.log_facts import Nccl, Stalls

_TAG = re.compile(r"\[\d+(?:,\d+)?\](?:\[\S+\])?<(?:stdout|stderr|stddiag)>:? ?")
"""Of mpirun --tag-output and horovodrun; Open MPI puts it into the middle of a line too."""

_LONGEST = 1 << 14
_LOGS = ("*.log", "*.out", "*.err", "output/**/*")


def collect_lines(paths: Sequence[Path]) -> list[str]:
    """What is worth telling of a job's output.

    Args:
        paths: files of output, of one rank or of all; NCCL_DEBUG_FILE's too.

    Returns:
        A line a matter: ranks that Horovod stalled on, NCCL's warnings, which network and links NCCL uses.

    Errors:
        TraceError: a file cannot be read.
    """
    stalls, nccl = Stalls(), Nccl()
    for path in paths:
        for line in _lines(path):
            if not nccl.take(line):
                stalls.take(line)
        stalls.end()
    return [*stalls.lines(), *nccl.lines()]


def find_logs(run: Path, nccl_debug_file: str | None = None) -> list[Path]:
    """Files of output of a run.

    Args:
        run: its folder: ``*.log, *.out, *.err`` there, and what is in ``output/``.
        nccl_debug_file: what NCCL_DEBUG_FILE was, as an absolute path; NCCL puts host and process for %h and %p.
    """
    found = {path for pattern in _LOGS for path in run.glob(pattern) if path.is_file()}
    if nccl_debug_file:
        pattern = re.sub("%[hp]", "*", glob.escape(nccl_debug_file))
        found |= {path for path in Path("/").glob(pattern.lstrip("/")) if path.is_file()}
    return sorted(found)


def _lines(path: Path) -> Iterator[str]:
    """Lines as the programs wrote them, without what launchers put before.

    Errors:
        TraceError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            for raw in iter(lambda: file.readline(_LONGEST), b""):
                yield from _plain(raw.decode("utf-8", "replace"))
    except OSError as error:
        raise TraceError(
            f"the output {path} cannot be read", found=error.strerror or str(error), next_step="check path and rights"
        ) from None


def _plain(line: str) -> Iterable[str]:
    return [part for part in _TAG.sub("", line).splitlines() if part.strip()]
